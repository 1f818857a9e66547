"""The file that a logger writes by itself: what it may be, and that it can be written."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Any

from trainer.core import arguments


def as_file_path(argument: str, value: Any) -> str:
    """Returns `value`, the path of a file that exists or not, as text.

    Raises:
      TypeError: if it is no path.
      ValueError: if it is empty, or something that is no regular file lies there, such as a device.
      IsADirectoryError: if a folder lies there.
    """
    path = arguments.as_path(argument, value)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"`{argument}` must be the path of a file, and is that of a folder. Give "
                                "the name of a file in it", path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"`{argument}` must be the path of a regular file, which can be cut and replaced. Received: "
                         f"{path!r}, which is none.")
    return path


def ready_file(path: str) -> str:
    """Returns the path that a file is written to, where links lead; its folder is made, and can be written.

    Raises:
      OSError: if the folder cannot be made or written, or the file cannot be; it says which.
      ValueError: as `as_file_path` does.
    """
    as_file_path("path", path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"The log {path!r} cannot be written to its folder ({error.strerror}). Give a "
                          "path in a folder that can be made and written", folder) from error
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "The log cannot be written (Permission denied). Give another path", path)
    return target
