"""Locks on files that end with the process that holds them, also when it is killed.

Owns the locking, and ensures that a forked process does not keep its parent's lock. On a file system without locks,
such as some network file systems, no process counts as holding a lock.
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
    """Opens a file or folder and locks it for this process, without waiting.

    Args:
      path: file or folder.
      flags: flags of `os.open`.

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
    """Returns whether a locked-on-creation file or folder was left by a process that has ended.

    Returns False if this is uncertain: without locks, or in the first seconds, before the lock may be taken.
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
    """Closes a descriptor of `open_locked` and ends its lock; does nothing in a forked process of the holder."""
    if is_held(descriptor):
        _open.remove(descriptor)
        os.close(descriptor)


def is_held(descriptor: int) -> bool:
    """Returns whether this process holds a lock that it got from `open_locked`."""
    return descriptor in _open


def _close_in_child() -> None:
    # All holders of the open file share the lock: a forked data loader would keep it after its parent is killed.
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
