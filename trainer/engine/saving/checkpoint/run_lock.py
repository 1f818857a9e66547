"""Exclusive use of a folder of checkpoints by a run.

Owns the lock file of a run, which identifies its holder. The kernel ends a lock with its process, also when it is
killed, so a killed run keeps no other run out. Knows nothing of the content of the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time

from trainer.core.errors import see
from trainer.core.files import read_json
from trainer.engine.saving.arrays import file_locks
from trainer.engine.saving.checkpoint.manifest import CheckpointError

FILE_NAME = ".in_use"
_WAIT_SECS = 3.0  # for a process that is ending
_POLL_SECS = 0.05


class RunLock:
    """Exclusive use of a folder, from construction to `release`.

    Args:
      folder: folder, created if missing, also if the run that held it removes it with its own end.

    Raises:
      CheckpointError: if another run holds the folder, in this process or another, on this host or another host that
        sees the folder. The message names it.
      OSError: if the folder or the file cannot be created.

    >>> lock = RunLock("run")
    >>> os.listdir("run")
    ['.in_use']
    >>> lock.release()
    >>> os.listdir("run")
    []
    """

    def __init__(self, folder: str):
        self._path = os.path.join(folder, FILE_NAME)
        deadline = time.monotonic() + _WAIT_SECS
        while (held := _try_to_lock(self._path)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Another run saves to {folder!r}: {_holder(self._path)}. Wait until it has ended, or give each "
                    f"run a folder of its own. {see('folder-in-use')}")
            time.sleep(_POLL_SECS)
        self._file: int | None = held
        about = {"pid": os.getpid(), "host": socket.gethostname(),
                 "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}
        os.ftruncate(held, 0)
        os.pwrite(held, json.dumps(about).encode(), 0)

    def release(self) -> None:
        """Lets others use the folder. A second call does nothing."""
        if self._file is not None and file_locks.is_held(self._file):
            with contextlib.suppress(OSError):  # it is gone, with its folder for example
                os.unlink(self._path)  # first, so that no other run's file is
            file_locks.close(self._file)
        self._file = None


def _try_to_lock(path: str) -> int | None:
    """Returns the open and locked file; None if another run holds it, or has just removed it."""
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        file = file_locks.open_locked(path, os.O_RDWR | os.O_CREAT)
    except (FileNotFoundError, FileExistsError):
        if os.path.isfile(folder) or os.path.islink(folder):  # a link to nothing
            raise
        return None  # its holder has just removed it
    if file is None:
        return None
    try:
        is_there = os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        is_there = False
    if not is_there:
        file_locks.close(file)
        return None
    return file


def _holder(path: str) -> str:
    try:
        about = read_json(path)
        return f"process {about['pid']:d} on {str(about['host'])!r}, since {str(about['since'])!r}"
    except (OSError, ValueError, LookupError, TypeError):
        return "a process that has not said which"
