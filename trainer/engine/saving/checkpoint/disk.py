"""File operations that a killed process cannot leave half done.

Owns the names of temporary folders and the atomic renaming of folders. Knows nothing of their content.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil

from trainer.core.files import flush
from trainer.engine.saving.arrays import file_locks

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def temporary_path(path: str) -> str:
    """Returns a new hidden name beside `path`, which `name_of_temporary` recognizes.

    >>> name_of_temporary(os.path.basename(temporary_path("run/step_3")))
    'step_3'
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(6)}.tmp")


def name_of_temporary(name: str) -> str | None:
    """Returns the final name of the temporary folder `name`; None if it is not a temporary folder."""
    match = _TEMPORARY.fullmatch(name)
    return match["name"] if match else None


def name_of_old(name: str) -> str | None:
    """Returns the former name of the folder `name` that was being replaced; None if it is not such a folder."""
    return name_of_temporary(f"{name.removesuffix('.old')}.tmp") if name.endswith(".old") else None


def put_in_place(temporary: str, path: str) -> None:
    """Renames the folder `temporary` to `path` in one step, and then removes a replaced folder.

    If the file system cannot exchange two names in one step, such as NFS, a replaced folder is first renamed to
    `.<name>.<hex>.old`. A process that is killed between the two renames leaves it there.

    Args:
      temporary: folder whose content is on the disk.
      path: its final name, in the same folder.

    Raises:
      OSError: if the names cannot be changed.
    """
    folder = os.path.dirname(path)
    if not os.path.lexists(path):
        os.rename(temporary, path)
        flush(folder)
    elif _exchange(temporary, path):
        flush(folder)
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        old = temporary_path(path).removesuffix(".tmp") + ".old"
        os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            os.rename(old, path)
            raise
        flush(folder)
        shutil.rmtree(old, ignore_errors=True)


def make_temporary(path: str) -> tuple[str, int | None]:
    """Creates a folder at a new `temporary_path` of `path`, and removes leftovers of killed processes.

    Returns:
      The folder, and its lock, which `file_locks.close` ends. The lock distinguishes a used folder from a leftover.
    """
    folder, name = os.path.split(path)
    for other in os.listdir(folder):
        if name_of_temporary(other) == name and file_locks.is_abandoned(os.path.join(folder, other)):
            shutil.rmtree(os.path.join(folder, other), ignore_errors=True)
    temporary = temporary_path(path)
    os.mkdir(temporary)
    return temporary, file_locks.open_locked(temporary)


def remove(path: str) -> None:
    """Removes a folder; removes only the link if it is a symbolic link.

    Raises:
      OSError: if it cannot be removed.
    """
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)


def discard(path: str) -> None:
    """Renames a folder, then deletes it; removes only the link if it is a symbolic link.

    Raises:
      OSError: if it cannot be removed.
    """
    temporary = temporary_path(path)
    os.rename(path, temporary)
    remove(temporary)


def _exchange(first: str, second: str) -> bool:
    """Exchanges two names in one step; returns whether the file system supports it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), second)
