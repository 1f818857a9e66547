"""Locks on files that end with the process that holds them, however that ends.

Owns how a lock is taken, and that a forked process does not keep its parent's. A file system without locks, as some
that are shared by many machines, is taken as one on which nobody holds any.
"""

from __future__ import annotations

import errno
import fcntl
import os

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_open: set[int] = set()


def open_locked(path: str, flags: int = os.O_RDONLY) -> int | None:
    """Opens a file or folder and locks it for this process alone, without waiting.

    Args:
      path: the file or folder.
      flags: as of `os.open`.

    Returns:
      The descriptor, to be closed with `close`; None if it is locked already, here or in another process.

    Raises:
      OSError: if it cannot be opened.
    """
    descriptor = os.open(path, flags, 0o666)
    if not lock(descriptor):
        os.close(descriptor)
        return None
    _open.add(descriptor)
    return descriptor


def lock(descriptor: int) -> bool:
    """Locks an open file until it is closed; returns whether nobody else holds a lock on it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def close(descriptor: int) -> None:
    """Closes what `open_locked` opened, which ends its lock."""
    _open.discard(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    # A lock belongs to all who hold the open file: a forked loader of data would keep it when its parent was killed.
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
