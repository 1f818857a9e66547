"""The only way to read files, which strangers may have made: limits on the opened files and the bytes read.

Owns limits that no file sets for itself, and the refusal of links out of a folder and of devices and pipes.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
from typing import Any

from trainer.core.errors import brief, naming_file, see
from trainer.core.files import storage

MOST_BYTES = 2**26  # of a file that is read at once, such as a text
_MOST_JSON_BYTES, _MOST_VALUES = 2**27, 2**22  # a value can take a hundred bytes of memory
_CHUNK_BYTES = 2**20
_LARGE = 2**28  # bytes, from which on content must not unpack to many times its own size
_LARGEST_EXPANSION = 100
_IS_ENCRYPTED = 1  # in the flags of a member


def open_file(path: str | os.PathLike[str], folder: str | None = None, buffering: int = -1) -> Any:
    """Opens a file for reading, as binary, unless it is a pipe, a device or a socket, which may never end.

    Args:
      path: path of the file, or of an object of an object store.
      folder: the folder that the file belongs to, which no link may lead out of; None follows all links.
      buffering: as of `open`.

    Raises:
      OSError: if it cannot be opened, or is not a file.
      ValueError: if links lead out of the folder.

    >>> open_file("/dev/zero")
    Traceback (most recent call last):
    OSError: [Errno 22] It is a pipe, a device or a socket. Copy its content into a file: '/dev/zero'
    """
    if storage.is_remote(path):
        return storage.open_object(os.fspath(path))
    if folder is not None:
        real, root = os.path.realpath(path), os.path.realpath(folder)
        if os.path.commonpath([real, root]) != root:
            raise ValueError(f"{os.fspath(path)!r} is a link out of its folder {folder!r}, to {real!r}, which is not "
                             f"followed. Copy the file into the folder. {see('foreign-file')}")
    return open(path, "rb", buffering, opener=_open_regular)


def read_file(path: str | os.PathLike[str], folder: str | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a file of a limited size; see `open_file`.

    Raises:
      OSError: from `open_file`.
      ValueError: from `open_file`, and if the file is larger.
    """
    with open_file(path, folder) as file:
        return read_at_most(os.fspath(path), file, most_bytes)


def read_json(path: str | os.PathLike[str], folder: str | None = None) -> Any:
    """Returns the value of a JSON file; see `read_file`."""
    with naming_file(os.fspath(path)):
        return parse_json(read_file(path, folder, _MOST_JSON_BYTES).decode())


def parse_json(text: str, **options: Any) -> Any:
    """Returns the value of a JSON text, with options of `json.loads`.

    Raises:
      ValueError: if it is not JSON, or has more values than this package writes, which would fill the memory.
      RecursionError: if it is nested too deeply.
    """
    values = sum(map(text.count, "[{,"))
    if values > _MOST_VALUES:
        raise ValueError(f"it has about {values:,} values. Expected: at most {_MOST_VALUES:,}")
    return json.loads(text, **options)


def read_at_most(path: str, file: Any, most_bytes: int, chunk_bytes: int = _CHUNK_BYTES) -> bytes:
    """Returns the rest of an open file, which is read in chunks.

    Args:
      path: path for the message.
      file: binary file, such as a packed file that is unpacked while it is read.
      most_bytes: limit, in bytes.
      chunk_bytes: bytes of a read.

    Raises:
      ValueError: if it has more bytes.
    """
    chunks, count = [], 0
    while chunk := file.read(min(chunk_bytes, most_bytes + 1 - count)):
        chunks.append(chunk)
        count += len(chunk)
        if count > most_bytes:
            raise ValueError(f"{path!r} holds more than {most_bytes:,} bytes, which is more than such a file has.")
    return b"".join(chunks)


def read_member(path: str, archive: zipfile.ZipFile, name: str, most_bytes: int | None = None) -> bytes:
    """Returns the content of a member of a zip archive.

    Args:
      path: path of the archive.
      archive: the open archive.
      name: name of the member.
      most_bytes: limit, in bytes; None for the limit of `check_expansion`.

    Raises:
      KeyError: if there is no such member.
      ValueError: if it is encrypted, damaged or too large.
    """
    member = archive.getinfo(name)
    if member.flag_bits & _IS_ENCRYPTED:
        raise ValueError(f"{path!r} is encrypted: its member {brief(repr(name))} cannot be read.")
    if most_bytes is None:
        most_bytes = check_expansion(path, os.path.getsize(path), member.file_size)
    with archive.open(member) as file:
        # A damaged directory claims fewer bytes than there are, which a read in one chunk would unpack first.
        return read_at_most(path, file, most_bytes, chunk_of(member))


def chunk_of(member: zipfile.ZipInfo) -> int:
    """Returns the bytes to read from a member at once, so that little is unpacked at once."""
    # For the formats but deflate, `zipfile` unpacks all of the packed bytes that it has read, up to 20,000 times them.
    return _CHUNK_BYTES if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) else 4096


def check_expansion(path: str, packed: int, unpacked: int) -> int:
    """Returns the limit in bytes of unpacked content; raises ValueError for more, made to fill the memory or the disk.

    Args:
      path: the file, for the message.
      packed: its size in bytes.
      unpacked: its size in bytes after it is unpacked, or as much of it as is known.
    """
    limit = max(_LARGE, _LARGEST_EXPANSION * packed)
    if unpacked > limit:
        raise ValueError(f"{path!r} would be {unpacked:,} bytes from {packed:,} packed bytes, more than data are. If "
                         f"it is what you mean, unpack it with another program. {see('foreign-file')}")
    return limit


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))  # a pipe would wait
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` refuses folders
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is a pipe, a device or a socket. Copy its content into a file", path)
    return descriptor
