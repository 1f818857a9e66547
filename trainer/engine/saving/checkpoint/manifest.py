"""Content of a complete checkpoint: the size and the SHA-256 of each of its files, in `manifest.json`.

Owns the manifest's format and the definition of damage. Knows nothing of the meaning of the files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.core.errors import brief, naming_file
from trainer.core.files import flush, open_file, parse_json, read_file, storage

FORMAT = 2  # of a checkpoint as a whole: one higher for each change that older versions could not read
FILE_NAME = "manifest.json"
DATA_FOLDER = re.compile(r"data\.[0-9a-f]{12}")  # of the files, in an object store


class CheckpointError(ValueError):
    """A checkpoint is damaged, does not fit, or cannot be written; the message names it and the cause."""


class NewerFormatError(CheckpointError):
    """A checkpoint has a format that only a newer version of the trainer can read."""


def write_manifest(folder: str | os.PathLike[str], known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Writes the manifest of all files below a folder, after they are on the disk.

    Args:
      folder: folder that is no longer written to. An existing manifest is replaced.
      known: "size" and "sha256" of files that are on the disk already, by path below the folder.

    Raises:
      OSError: if a file cannot be read, or the disk is full.

    >>> os.makedirs("saved", exist_ok=True)
    >>> with open("saved/notes.txt", "w") as file:
    ...     _ = file.write("whole")
    >>> write_manifest("saved")
    >>> check_manifest("saved")
    """
    folder = os.fspath(folder)
    files: dict[str, Any] = dict(known or {})
    for path in _files_below(folder):
        name = os.path.relpath(path, folder).replace(os.sep, "/")
        if name != FILE_NAME and name not in files:
            flush(path)
            files[name] = size_and_hash(path, folder)
    path = os.path.join(folder, FILE_NAME)
    with open(path, "wb") as file:
        file.write(text_of(files))
    flush(path)
    for parent, _, _ in os.walk(folder, topdown=False):
        flush(parent)


def text_of(files: Mapping[str, Mapping[str, Any]], folder: str = "") -> bytes:
    """Returns the content of a manifest.

    Args:
      files: "size" and "sha256" of each file, by path below the checkpoint.
      folder: the folder in the checkpoint that has all of them, if any.
    """
    content = {"files": files, "format": FORMAT, **({"folder": folder} if folder else {})}
    return _text({**content, "digest": _digest(content)})


def data_folder(path: str) -> str:
    """Returns the folder with the files of a checkpoint; raises as `check_manifest` for a damaged manifest."""
    name = _read(path).get("folder") if is_checkpoint(path) else None
    return os.path.join(path, name) if name else path


def is_checkpoint(folder: str) -> bool:
    """Returns whether a folder looks like a checkpoint. Its files are not checked."""
    return storage.is_file(os.path.join(folder, FILE_NAME))


def check_manifest(folder: str | os.PathLike[str]) -> None:
    """Checks that a checkpoint is complete: each file equals the saved file, bit for bit.

    Files that are not in the manifest are ignored: nothing reads them.

    Args:
      folder: folder of the checkpoint.

    Raises:
      FileNotFoundError: if there is no such folder.
      NewerFormatError: if a newer version of the trainer has written it.
      CheckpointError: if a file is missing, truncated, changed or unreadable. The message names it.
      PermissionError: if a file is not readable.
    """
    for _, error in _damages(folder):
        raise error


def damaged_files(folder: str | os.PathLike[str]) -> dict[str, CheckpointError]:
    """Returns the error of each damaged file of a checkpoint, by its path below the folder.

    Args:
      folder: folder of the checkpoint.

    Raises:
      The errors of `check_manifest`, if they concern the manifest or the folder itself.
    """
    return dict(_damages(folder))


def _damages(folder: str | os.PathLike[str]) -> Iterator[tuple[str, CheckpointError]]:
    folder = os.fspath(folder)
    if not storage.is_folder(folder):
        raise FileNotFoundError(f"There is no checkpoint {folder!r}.")
    for name, expected in _read(folder)["files"].items():
        try:
            size = _checked(folder, name, storage.size)
            if size != expected["size"]:
                raise _damaged(folder, name, f"has {size} bytes instead of {brief(expected['size'])}")
            if _checked(folder, name, lambda path: size_and_hash(path, folder))["sha256"] != expected["sha256"]:
                raise _damaged(folder, name, "has other bytes than were written")
        except CheckpointError as error:
            yield name, error


def _read(folder: str) -> dict[str, Any]:
    """Returns the content of a manifest after its verification."""
    text = _checked(folder, FILE_NAME, lambda path: read_file(path, folder))
    try:
        content = parse_json(text.decode())
        digest = content.pop("digest")
        # For all formats, now and later: the digest distinguishes a damaged manifest from a newer manifest.
        whole = digest == _digest(content) and text == _text({**content, "digest": digest})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise _damaged(folder, FILE_NAME, "has other bytes than were written")
    with naming_file(os.path.join(folder, FILE_NAME)):
        is_newer = content["format"] > FORMAT
    if is_newer:
        raise NewerFormatError(
            f"The checkpoint {folder!r} was written by a newer version of the trainer: it has the format "
            f"{brief(content['format'])}, this version reads up to {FORMAT}. Upgrade with "
            "`pip install -U trainer-jax`.")
    with naming_file(os.path.join(folder, FILE_NAME)):
        for name, expected in content["files"].items():
            if os.path.isabs(name) or os.path.pardir in name.split("/") or "\0" in name:
                raise ValueError("it names a file outside of the checkpoint")
            expected["size"], expected["sha256"]
        if "folder" in content and not DATA_FOLDER.fullmatch(content["folder"]):
            raise ValueError("it names a folder outside of the checkpoint")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_text(content)).hexdigest()


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"


def _files_below(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for name in sorted(names):
            yield os.path.join(parent, name)


def size_and_hash(path: str, folder: str) -> dict[str, Any]:
    """Returns "size" and "sha256" of a file, which no link may lead out of a folder."""
    with open_file(path, folder) as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def _checked(folder: str, name: str, read: Any) -> Any:
    try:
        return read(os.path.join(folder, name))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _damaged(folder, name, "is missing") from None
    except OSError as error:
        # Drivers of object stores have these errors for failures of the network too.
        if storage.is_remote(folder) or error.errno not in (errno.EIO, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
            raise
        raise _damaged(folder, name, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _damaged(folder, name, f"cannot be read ({brief(error)})") from None


def _damaged(folder: str, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {folder!r} is damaged: its file {brief(repr(name))} {what}.")
