"""The callbacks' records of the initial side effects of a run, for a run that is killed before its first checkpoint.

Owns the file of these records, which lies beside the checkpoints until the first checkpoint exists.
"""

from __future__ import annotations

import contextlib
import json
import os

from trainer.callbacks import CallbackList
from trainer.core.errors import brief
from trainer.core.files import read_json, replace_file, storage

FILE_NAME = "begun.json"


def begin(folder: str, callbacks: CallbackList) -> None:
    """Records the start of a run in a folder without a checkpoint, or rolls the callbacks back to an earlier record.

    Raises:
      ValueError: if the file in the folder is not such a record.
      OSError: if the file cannot be read or written.
    """
    path = os.path.join(folder, FILE_NAME)
    if storage.exists(path):
        try:
            callbacks.rollback_side_effects(dict(read_json(path, folder)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path!r} is not a file that a run has written: {brief(repr(error))}. Delete it.") from error
    note = callbacks.snapshot_side_effects()
    if note:
        replace_file(path, json.dumps(note))


def forget(folder: str) -> None:
    """Removes the file: the run has a checkpoint, or has ended."""
    for name in (FILE_NAME, f"{FILE_NAME}.tmp"):
        with contextlib.suppress(FileNotFoundError):
            storage.remove(os.path.join(folder, name))
