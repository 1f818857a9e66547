"""Locks on files that end with the process that holds them, however that ends.

Owns how a lock is taken, and that a forked process does not keep its parent's. A file system without locks, as some
that are shared by many machines, is taken as one on which no process holds any.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_UNLOCKED_SECS = 10.0
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
    """Locks an open file until it is closed; returns whether no other process holds a lock on it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def is_abandoned(path: str) -> bool:
    """Returns whether a file or folder that is locked as soon as it is made was left by a process that has ended.

    False where that is not certain: without locks, or in its first seconds, in which it may not be locked yet.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - os.fstat(descriptor).st_mtime > _UNLOCKED_SECS
        finally:
            os.close(descriptor)
    except OSError:
        return False


def close(descriptor: int) -> None:
    """Closes what `open_locked` opened, which ends its lock; nothing in a forked process, whose parent holds it."""
    if is_held(descriptor):
        _open.remove(descriptor)
        os.close(descriptor)


def is_held(descriptor: int) -> bool:
    """Returns whether this process holds a lock that it got from `open_locked`."""
    return descriptor in _open


def _close_in_child() -> None:
    # A lock belongs to all who hold the open file: a forked loader of data would keep it when its parent was killed.
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
