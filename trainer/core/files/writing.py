"""The one way to write small files, logs and files that are made locally, so that a kill leaves none torn."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from trainer.core.files import storage


def replace_file(path: str, content: bytes | str) -> None:
    """Replaces a file, or an object of a store, in one step; on return the content is on the disk.

    The file `path + ".tmp"` is left behind by a killed process, and replaced by the next.

    Args:
      path: path of the file, in an existing folder.
      content: the bytes, or a text for UTF-8.

    Raises:
      OSError: if it cannot be written. The former content remains.

    >>> replace_file("note.json", "{}")
    >>> os.listdir()
    ['note.json']
    """
    data = content.encode() if isinstance(content, str) else content
    if storage.is_remote(path):
        storage.write_object(path, data)
        return
    try:
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.tmp")
        raise
    flush(os.path.dirname(path) or os.curdir)


def flush(path: str) -> None:
    """Flushes a file, or the names in a folder, to the disk.

    Raises:
      OSError: if it cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not os.path.isdir(path):  # some file systems have no fsync of folders
            raise
    finally:
        os.close(descriptor)


def open_log(path: str) -> io.BufferedIOBase:
    """Opens a file to append to, which `flush` writes to the disk.

    In a store nothing is appended to: its content is in memory, and each `flush` writes all of it.
    """
    if storage.is_remote(path):
        return _Log(path)
    return open(path, "ab")


class _Log(io.BytesIO):
    """The content of an object, which `flush` writes if it has changed."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path
        if storage.is_file(path):
            with storage.open_object(path) as file:
                super().write(file.read())
        self._is_written = True

    def write(self, content: Any) -> int:
        self._is_written = False
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self._is_written = False
        length = super().truncate(size)
        self.seek(0, os.SEEK_END)
        return length

    def flush(self) -> None:
        if not self.closed and not self._is_written:
            storage.write_object(self._path, self.getvalue())
            self._is_written = True

    def close(self) -> None:
        self.flush()
        super().close()


@contextlib.contextmanager
def new_file(path: str) -> Iterator[Any]:
    """Yields a new binary file to write, which is on the disk, or is a whole object of a store, after the statement.

    Raises:
      FileExistsError: if there is a file.
      OSError: if it cannot be written.
    """
    if storage.is_remote(path):
        with storage.NewObject(path) as entry:
            yield entry
        return
    with open(path, "xb") as file:  # buffered, as unbuffered writes may be short, of a full disk or of 2 GiB
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def local_file(path: str) -> Iterator[str]:
    """Yields the path of a local file to write, which is then copied to `path`, if `path` is in a store.

    >>> with local_file("memory://bucket/log.txt") as local, open(local, "w") as file:
    ...     _ = file.write("line")
    >>> storage.open_object("memory://bucket/log.txt").read()
    b'line'
    """
    if not storage.is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        local = os.path.join(folder, os.path.basename(path))
        yield local
        storage.upload(local, path)
