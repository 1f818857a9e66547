"""Extraction of archives into a folder that no member can leave.

Owns the rejection of members. A folder appears complete, or not at all.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.core.errors import brief
from trainer.core.files import check_expansion, chunk_of, open_file

FORMATS = ("tar", "zip")
_FEW_MEMBERS, _MEMBER_BYTES = 10_000, 32  # above so many, a member has at least so many packed bytes
_LONGEST_PATH = 2048  # of a member, with links resolved: some versions of `tarfile` check no longer paths
_LARGEST_READ = 2**20
_COMPRESSIONS: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ": lzma, b"]\0\0": lzma}
_NAMES_THAT_FAIL = (errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, MemoryError,
            NotImplementedError, RuntimeError)  # the last two: compressions and passwords that `zipfile` does not know


def extract(archive: str, folder: str, formats: Sequence[str]) -> bool:
    """Extracts an archive, and replaces a folder by its content.

    Args:
      archive: path of the archive.
      folder: path of the folder; existing content is replaced.
      formats: formats to try in order: "tar" (also compressed) and "zip".

    Returns:
      Whether the file is an archive of such a format.

    Raises:
      ValueError: if a member lies outside of the folder or is a device, or the archive is damaged.
    """
    with open_file(archive) as file:
        try:
            opened = next((found for name in formats if (found := _OPENERS[name](archive, file))), None)
        except _DAMAGED as error:
            raise ValueError(f"{archive!r} is damaged: {brief(error)}. Nothing of it was kept.") from error
        if opened is None:
            return False
        with opened:
            _extract(archive, opened, folder)
    return True


def _extract(archive: str, opened: tarfile.TarFile | zipfile.ZipFile, folder: str) -> None:
    parent, name = os.path.split(os.path.abspath(folder))
    temporary = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        try:
            if isinstance(opened, tarfile.TarFile):
                # The filter refuses paths and links that lead out of the folder, and devices.
                opened.extractall(temporary, _within_limits(archive, opened, temporary), filter="data")
            else:
                _unpack_zip(archive, opened, temporary)
        except (*_DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, *_NAMES_THAT_FAIL):
                raise
            raise ValueError(f"{archive!r} cannot be extracted: {brief(error)} Nothing of it was kept.") from error
        os.chmod(temporary, 0o777 & ~umask())
        if os.path.isdir(folder):
            shutil.rmtree(folder)
        elif os.path.lexists(folder):
            os.remove(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def umask() -> int:
    """Returns the umask: `tempfile` gives its files no permissions for others."""
    found = os.umask(0o077)
    os.umask(found)
    return found


class _Unpacked:
    """The content of a packed tar archive, which is an error where it is made to fill the memory or the disk."""

    def __init__(self, path: str, packed: Any, unpacked: Any):
        self._path, self._bytes, self._file = path, os.fstat(packed.fileno()).st_size, unpacked
        self.tell, self.close = unpacked.tell, unpacked.close

    def read(self, size: int) -> bytes:
        if size > _LARGEST_READ:  # as of a header; contents are read in chunks
            raise ValueError(f"it has a header of {size:,} bytes")
        self._check(self._file.tell() + size)
        return self._file.read(size)

    def seek(self, place: int) -> int:
        self._check(place)
        return self._file.seek(place)

    def _check(self, place: int) -> None:
        check_expansion(self._path, self._bytes, place)


def _open_tar(path: str, file: Any) -> tarfile.TarFile | None:
    file.seek(0)
    start = file.read(8)
    file.seek(0)
    packed = next((module for first, module in _COMPRESSIONS.items() if start.startswith(first)), None)
    content: Any = _Unpacked(path, file, file if packed is None else packed.open(file))
    try:
        return tarfile.open(fileobj=content, mode="r:")
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError):
        return None


def _open_zip(path: str, file: Any) -> zipfile.ZipFile | None:
    return zipfile.ZipFile(file) if zipfile.is_zipfile(file) else None


_OPENERS = {"tar": _open_tar, "zip": _open_zip}


def _within_limits(path: str, opened: tarfile.TarFile, folder: str) -> Iterator[tarfile.TarInfo]:
    """Yields the members of an archive, which is read once, and extracted meanwhile."""
    unpacked, packed, has_links = 0, os.path.getsize(path), False
    for count, member in enumerate(opened):
        unpacked += member.size
        check_expansion(path, packed, unpacked)
        if count > max(_FEW_MEMBERS, packed // _MEMBER_BYTES):
            raise ValueError(f"it has more than {count:,} members in {packed:,} bytes")
        has_links = has_links or member.issym()
        for name in (member.name, os.path.join(os.path.dirname(member.name), member.linkname)):
            place = os.path.join(folder, name)
            if len(os.fsencode(os.path.realpath(place) if has_links else place)) > _LONGEST_PATH:
                raise ValueError(f"the path of the member {brief(repr(member.name))} is too long")
        yield member


def _unpack_zip(archive: str, opened: zipfile.ZipFile, folder: str) -> None:
    root, members = os.path.realpath(folder), opened.infolist()
    check_expansion(archive, os.path.getsize(archive), sum(member.file_size for member in members))
    for member in members:
        path = os.path.realpath(os.path.join(root, member.filename))
        if os.path.commonpath([root, path]) != root or os.path.isabs(member.filename):
            raise zipfile.BadZipFile(f"The member {brief(repr(member.filename))} would lie outside of the folder.")
    for member in members:
        path = os.path.join(root, member.filename)
        os.makedirs(path if member.is_dir() else os.path.dirname(path), exist_ok=True)
        if not member.is_dir():
            with opened.open(member) as packed, open(path, "wb") as file:
                shutil.copyfileobj(packed, file, chunk_of(member))
