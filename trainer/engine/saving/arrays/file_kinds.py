"""Opens safetensors files, and detects other kinds of files.

Owns the errors about unreadable paths, and the checksum of files that hold a text besides their arrays. The readers
know the purpose of the files.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping

import numpy as np

from trainer.core import errors
from trainer.core.files import open_file, storage
from trainer.engine.saving.arrays.safetensors_file import ArraysFile, checksum, read_arrays, save_arrays

_CHECKSUM_KEY = "checksum"
_FIRST_BYTES = {  # of files of other formats
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, as Keras writes its weights",
    b"PK\x03\x04": "a zip archive, as `.keras`, `.npz` and PyTorch's files are",
    b"\x93NUMPY": "a NumPy file of one array",
    b"\x80": "a Python pickle, which could run any code and so is never read",
}
_IN_ZIP = {  # by the ends of names of files in the archive
    "model.weights.h5": "a model that Keras saved", "/data.pkl": "a file of PyTorch", ".npy": "an archive of NumPy",
}


def checked_path(argument: str, value: object) -> str:
    """Returns a path as a string; raises as `storage.as_place` does."""
    return storage.as_place(argument, value, "a path, such as 'model.safetensors'")


def open_arrays(path: str, expected: str, instead_of_folder: str) -> ArraysFile:
    """Opens a safetensors file; see `safetensors_file.read_arrays`.

    Args:
      path: path of the file.
      expected: expected kind of file, for error messages.
      instead_of_folder: sentence with advice for a folder.

    Raises:
      FileNotFoundError: if there is no such file; the message lists similar names in the folder.
      IsADirectoryError: if the path is a folder.
      ValueError: if the path is not a safetensors file, or is damaged.
      OSError: if it is a pipe or a device.
    """
    if storage.is_folder(path):
        raise IsADirectoryError(f"{path!r} is a folder. Expected: {expected}. {instead_of_folder}")
    if not storage.exists(path):
        raise _missing(path)
    try:
        return read_arrays(path)
    except ValueError as error:
        with open_file(path) as file:
            start = file.read(8)
        for first_bytes, kind in _FIRST_BYTES.items():
            if start.startswith(first_bytes):
                raise ValueError(f"{path!r} is {_kind_of_zip(path) or kind}. Expected: {expected}. Read it with the "
                                 "program that it is of, and give its arrays to `set_weights`, in the order of "
                                 "`get_weights`.") from None
        if path.endswith(".msgpack"):
            raise ValueError(f"{path!r} is a file of `flax.serialization`. Expected: {expected}. Read it by `params = "
                             "flax.serialization.msgpack_restore(open(path, \"rb\").read())`; after `build(x)`, "
                             "`model.state = model.state.replace(params=params)` sets it.") from None
        raise ValueError(f"{error} Expected: {expected}.") from None


def save_with_text(path: str, key: str, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays and, in the metadata under a key, a text; see `safetensors_file.save_arrays`."""
    save_arrays(path, arrays, {key: text, _CHECKSUM_KEY: checksum(text, arrays)})


def read_with_text(
    path: str, key: str, expected: str, instead_of_folder: str, instead_of_others: str
) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the text and the arrays of a file that `save_with_text` wrote under the same key.

    Args:
      path, expected, instead_of_folder: arguments of `open_arrays`.
      key: key of the text.
      instead_of_others: sentence with advice for a file without such a text.

    Raises:
      FileNotFoundError, IsADirectoryError: from `open_arrays`.
      ValueError: if the file is of another kind or damaged.
    """
    with open_arrays(path, expected, instead_of_folder) as file:
        text = file.metadata.get(key)
        if text is None:
            raise ValueError(f"{path!r} is another kind of file. Expected: {expected}. {instead_of_others}")
        arrays = dict(file)
        if file.metadata.get(_CHECKSUM_KEY) != checksum(text, arrays):
            raise ValueError(f"{path!r} is damaged: its content does not have the checksum that it was saved with. "
                             "Copy the file again, or save it again.")
    return text, arrays


def is_whole(file: ArraysFile, key: str) -> bool:
    """Returns whether a file of `save_with_text` matches its checksum. Reads the file once, array by array.

    Raises:
      ValueError: if the file is truncated during the read.
    """
    return file.metadata.get(_CHECKSUM_KEY) == checksum(file.metadata[key], file)


def _kind_of_zip(path: str) -> str | None:
    """Returns the kind of a zip archive by the names in it; None for other files and unknown archives."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return None
    return next((kind for part, kind in _IN_ZIP.items() if any(name.endswith(part) for name in names)), None)


def _missing(path: str) -> FileNotFoundError:
    folder, name = os.path.split(path)
    try:
        known = storage.names(folder or ".")
    except OSError:
        return FileNotFoundError(f"There is no file {path!r}, nor its folder {folder!r}.")
    near = errors.near_names(name, sorted(known))
    hint = "" if os.path.isabs(path) or storage.is_remote(path) else f" The working directory is {os.getcwd()!r}."
    if near:
        hint = f" Did you mean {' or '.join(repr(os.path.join(folder, other)) for other in near)}?"
    return FileNotFoundError(f"There is no file {path!r}.{hint}")
