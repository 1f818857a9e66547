"""Extraction of archives into a folder that no member can leave.

Owns the rejection of members. A folder appears complete, or not at all.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence

FORMATS = ("tar", "zip")


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
    unpack = next((_UNPACKERS[name][1] for name in formats if _UNPACKERS[name][0](archive)), None)
    if unpack is None:
        return False
    parent, name = os.path.split(os.path.abspath(folder))
    temporary = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        try:
            unpack(archive, temporary)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{archive!r} cannot be extracted: {error} Nothing of it was kept.") from error
        os.chmod(temporary, 0o777 & ~umask())
        if os.path.isdir(folder):
            shutil.rmtree(folder)
        elif os.path.lexists(folder):
            os.remove(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def umask() -> int:
    """Returns the umask: `tempfile` gives its files no permissions for others."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _unpack_tar(archive: str, folder: str) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")  # refuses paths and links that lead out of the folder, and devices


def _unpack_zip(archive: str, folder: str) -> None:
    root = os.path.realpath(folder)
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            path = os.path.realpath(os.path.join(root, member.filename))
            if os.path.commonpath([root, path]) != root or os.path.isabs(member.filename):
                raise zipfile.BadZipFile(f"The member {member.filename!r} would lie outside of the folder.")
        opened.extractall(folder)


_UNPACKERS: dict[str, tuple[Callable[[str], bool], Callable[[str, str], None]]] = {
    "tar": (tarfile.is_tarfile, _unpack_tar), "zip": (zipfile.is_zipfile, _unpack_zip)}
