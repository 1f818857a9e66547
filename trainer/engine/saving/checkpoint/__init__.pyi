from trainer.engine.saving.checkpoint.folder import CheckpointFolder as CheckpointFolder
from trainer.engine.saving.checkpoint.manifest import (
    CheckpointError as CheckpointError,
    NewerFormatError as NewerFormatError,
    check_manifest as check_manifest,
    data_folder as data_folder,
    damaged_files as damaged_files,
    is_checkpoint as is_checkpoint,
    write_manifest as write_manifest,
)
from trainer.engine.saving.checkpoint.reader import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
from trainer.engine.saving.checkpoint.writer import CheckpointWriter as CheckpointWriter
