"""Exclusive use of a folder of checkpoints by a run.

Owns the lock file of a run, which identifies its holder. The kernel ends a lock with its process, also when it is
killed, so a killed run keeps no other run out. An object store has no locks: there, the newest run takes the folder.
Knows nothing of the content of the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import time

from trainer.core.errors import see
from trainer.core.files import read_json, replace_file, storage
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
        os.ftruncate(held, 0)
        os.pwrite(held, json.dumps(_about_this_process()).encode(), 0)

    def release(self) -> None:
        """Lets others use the folder. A second call does nothing."""
        if self._file is not None and file_locks.is_held(self._file):
            with contextlib.suppress(OSError):  # it is gone, with its folder for example
                os.unlink(self._path)  # first, so that no other run's file is
            file_locks.close(self._file)
        self._file = None


class RunLease:
    """Use of a folder of an object store, from construction until another run takes it, or `release`.

    A store cannot tell a running process from a killed one, so a new run always gets the folder. A former run that is
    still running finds out at its next save.

    Args:
      folder: URL of the folder.

    Raises:
      OSError: if the store cannot be written.
    """

    def __init__(self, folder: str):
        self._path = os.path.join(folder, FILE_NAME)
        self._about = {**_about_this_process(), "lease": secrets.token_hex(6)}
        replace_file(self._path, json.dumps(self._about))

    def check(self) -> None:
        """Raises CheckpointError if another run has taken the folder."""
        if not self._is_held():
            raise CheckpointError(f"The folder {os.path.dirname(self._path)!r} was taken by another run: "
                                  f"{_holder(self._path)}. Give each run a folder of its own. {see('folder-in-use')}")

    def release(self) -> None:
        """Removes the note of this run."""
        with contextlib.suppress(OSError):
            if self._is_held():
                storage.remove(self._path)

    def _is_held(self) -> bool:
        try:
            return read_json(self._path) == self._about
        except (FileNotFoundError, ValueError):
            return False


def _about_this_process() -> dict[str, object]:
    return {"pid": os.getpid(), "host": socket.gethostname(),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}


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
