"""Checkpoints on the disk: complete or not there, checked bit for bit, restored exactly on any devices.

The lowest level of an exact resume. It knows names, arrays and plain values, nothing of models, loops or callbacks.
"""

from trainer.saving.checkpoint.folder import CheckpointFolder
from trainer.saving.checkpoint.manifest import (
    CheckpointError,
    NewerFormatError,
    check_manifest,
    damaged_files,
    is_checkpoint,
    write_manifest,
)
from trainer.saving.checkpoint.plain import decode, encode
from trainer.saving.checkpoint.reader import Checkpoint, open_checkpoint
from trainer.saving.checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointWriter",
    "NewerFormatError",
    "check_manifest",
    "damaged_files",
    "decode",
    "encode",
    "is_checkpoint",
    "open_checkpoint",
    "write_manifest",
]
