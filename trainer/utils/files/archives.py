"""Extraction of archives into a folder that no member can leave.

Owns the rejection of members. A folder appears complete, or not at all.
"""

from __future__ import annotations

import errno
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence

from trainer.core.errors import brief

FORMATS = ("tar", "zip")
_LARGE = 2**28  # bytes, from which on an archive must not unpack to many times its own size
_LARGEST_EXPANSION = 100
_IS_ENCRYPTED = 1  # in the flags of a member
_NAMES_THAT_FAIL = (errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, NotImplementedError,
            RuntimeError)  # the last three: names, compressions and passwords that `zipfile` does not know


def check_expansion(path: str, packed: int, unpacked: int) -> None:
    """Raises ValueError for content that was made to fill the memory or the disk.

    Args:
      path: the file, for the message.
      packed: its size in bytes.
      unpacked: its size in bytes after it is unpacked.
    """
    if unpacked > max(_LARGE, _LARGEST_EXPANSION * packed):
        raise ValueError(f"{path!r} would be {unpacked:,} bytes from {packed:,} packed ones, more than data are. If it "
                         "is what you mean, unpack it with another program.")


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
    try:
        unpack = next((_UNPACKERS[name][1] for name in formats if _UNPACKERS[name][0](archive)), None)
    except _DAMAGED as error:
        raise ValueError(f"{archive!r} is damaged: {brief(error)}. Nothing of it was kept.") from error
    if unpack is None:
        return False
    parent, name = os.path.split(os.path.abspath(folder))
    temporary = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        try:
            unpack(archive, temporary)
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
    return True


def read_member(path: str, archive: zipfile.ZipFile, name: str) -> bytes:
    """Returns the content of a member of a zip archive.

    Raises:
      KeyError: if there is no such member.
      ValueError: if it is encrypted, or was made to fill the memory.
    """
    member = archive.getinfo(name)
    if member.flag_bits & _IS_ENCRYPTED:
        raise ValueError(f"The member {name!r} is encrypted.")
    check_expansion(path, member.compress_size, member.file_size)
    return archive.read(member)


def umask() -> int:
    """Returns the umask: `tempfile` gives its files no permissions for others."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _unpack_tar(archive: str, folder: str) -> None:
    with tarfile.open(archive) as opened:
        # The filter refuses paths and links that lead out of the folder, and devices.
        opened.extractall(folder, _without_expansion(archive, opened), filter="data")


def _without_expansion(archive: str, opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the members of an archive, which is read once."""
    unpacked = 0
    for member in opened:
        unpacked += member.size
        check_expansion(archive, os.path.getsize(archive), unpacked)
        yield member


def _unpack_zip(archive: str, folder: str) -> None:
    root = os.path.realpath(folder)
    with zipfile.ZipFile(archive) as opened:
        check_expansion(archive, os.path.getsize(archive), sum(member.file_size for member in opened.infolist()))
        for member in opened.infolist():
            path = os.path.realpath(os.path.join(root, member.filename))
            if os.path.commonpath([root, path]) != root or os.path.isabs(member.filename):
                raise zipfile.BadZipFile(f"The member {member.filename!r} would lie outside of the folder.")
        opened.extractall(folder)


_UNPACKERS: dict[str, tuple[Callable[[str], bool], Callable[[str, str], None]]] = {
    "tar": (tarfile.is_tarfile, _unpack_tar), "zip": (zipfile.is_zipfile, _unpack_zip)}
