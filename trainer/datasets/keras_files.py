"""Files of Keras's data sets: in its cache folder, downloaded, or at a given path."""

from __future__ import annotations

import gzip
import io
import math
import os
import zipfile
from collections.abc import Sequence

import numpy as np

from trainer.core import arguments
from trainer.core.errors import brief, naming_file
from trainer.core.files import check_expansion, open_file, read_file, read_member
from trainer.utils.files import object_stream
from trainer.utils.files.get_file import get_file

Split = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""`(x_train, y_train), (x_test, y_test)`."""

_MOST_CIFAR_BYTES = 2**28
ORIGIN = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"

# The SHA-256 of each file there, or Keras's MD5.
_HASHES = {
    "boston_housing.npz": "f553886a1f8d56431e820c5b82552d9d95cfcb96d1e678153f8839538947dff5",
    "california_housing.npz": "1a2e3a52e0398de6463aebe6f4a8da34fb21fbb6b934cf88c3425e766f2a1a6f",
    "imdb.npz": "69664113be75683a8fe16e3ed0ab59fda8886cb3cd7ada244f7d9544e4676b9f",
    "imdb_word_index.json": "bfafd718b763782e994055a2d397834f",
    "mnist.npz": "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
    "reuters.npz": "d6586e694ee56d7a4e65172e12b3e987c03096cb01eab99753921ef915959916",
    "reuters_word_index.json": "4d44cc38712099c9e383dc6e5f11a921",
}

# Of each archive of CIFAR: the folder in it, and the SHA-256.
_ARCHIVES = {
    "cifar-10": ("cifar-10-batches-py", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    "cifar-100": ("cifar-100-python", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
}


def path_of(path: str | os.PathLike[str], name: str) -> str:
    """Returns the path of a file, which is downloaded if missing.

    Args:
      path: name in the cache folder; or with folders, the path of an existing file.
      name: name of the file on Keras's server.
    """
    path = arguments.as_path("path", path)
    if not os.path.dirname(path):
        return get_file(path, ORIGIN + name, file_hash=_HASHES[name])
    if not os.path.isfile(path):
        raise FileNotFoundError(f"`path` must be a name in the cache folder, such as {name!r}, or the path of a copy "
                                f"of the file. Received: {path!r}, where there is no file.")
    return path


def archive_folder(path: str | os.PathLike[str] | None, archive: str) -> str:
    """Returns the folder of a CIFAR archive, which is downloaded if missing.

    Args:
      path: the folder, or its parent folder; None for the cache folder.
      archive: "cifar-10" or "cifar-100".
    """
    name, file_hash = _ARCHIVES[archive]
    folder = (get_file(f"{name}-target", f"https://www.cs.toronto.edu/~kriz/{archive}-python.tar.gz", extract=True,
                       file_hash=file_hash) if path is None else arguments.as_path("path", path, "a folder"))
    inner = os.path.join(folder, name)
    return inner if os.path.isdir(inner) else folder


def files_in(path: str | os.PathLike[str], names: Sequence[str]) -> list[str]:
    """Returns the paths of files in a folder.

    Raises:
      FileNotFoundError: if a file is missing.
    """
    folder = arguments.as_path("path", path, "a folder")
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise FileNotFoundError(f"`path` must be a folder with the files {', '.join(map(repr, names))}. Received: "
                                f"{folder!r}, where there is no {missing[0]!r}.")
    return [os.path.join(folder, name) for name in names]


def npz_arrays(path: str, *names: str) -> list[np.ndarray]:
    """Returns arrays of an `.npz` file by name, including arrays of objects."""
    with naming_file(path), open_file(path) as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("The file is no zip archive, as `.npz` files are.")
        with zipfile.ZipFile(file) as archive:
            return [_array(read_member(path, archive, f"{name}.npy")) for name in names]


def _array(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                   else np.lib.format.read_array_header_2_0)
    if not read_header(file)[2].hasobject:
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    found = object_stream.parse(data[file.tell():])
    if not isinstance(found, np.ndarray):  # lists within lists can be of any size
        raise ValueError("It has no array of objects.")
    return np.asarray(found)


def idx_array(path: str) -> np.ndarray:
    """Returns the array of a gzipped file in MNIST's original format."""
    try:
        with naming_file(path), open_file(path) as packed, gzip.open(packed, "rb") as file:
            start = file.read(4)
            if start[:3] != b"\0\0\x08":
                raise ValueError("The file does not begin like the files of MNIST.")
            shape = np.frombuffer(file.read(4 * start[3]), ">u4", start[3]).tolist()
            check_expansion(path, os.path.getsize(path), math.prod(shape))
            data = file.read(math.prod(shape) + 1)  # the one more would be wrong, and its end verifies the checksum
            return np.frombuffer(data, np.uint8).reshape(shape)
    except gzip.BadGzipFile as error:
        raise ValueError(
            f"{path!r} is no file of gzip, or damaged: {brief(error)}. Download or copy it again.") from error


def cifar_batches(paths: list[str], labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, channels last, and the labels, `(rows, 1)`, of CIFAR files."""
    images, classes = [], []
    for path in paths:
        with naming_file(path):
            batch = {_text(key): value for key, value in object_stream.parse(
                read_file(path, most_bytes=_MOST_CIFAR_BYTES)).items()}
            pixels, numbers = batch["data"], batch[labels]
            if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or not isinstance(
                    numbers, list) or set(map(type, numbers)) - {int}:
                raise ValueError("It does not have an array of bytes and a list of labels")
            images.append(np.asarray(pixels).reshape(-1, 3, 32, 32))
            classes.append(np.array(numbers, np.uint8))
            if len(classes[-1]) != len(images[-1]):
                raise ValueError("It does not have a label for each image")
    return np.concatenate(images).transpose(0, 2, 3, 1), np.concatenate(classes)[:, None]


def shuffled_split(x: np.ndarray, y: np.ndarray, test_split: float, seed: int) -> Split:
    """Returns rows in Keras's order for a seed, with the last rows as the test part."""
    arguments.require({"test_split": test_split}, "a number in [0, 1)", lambda share: 0 <= share < 1)
    order = shuffled(len(x), np.random.RandomState(arguments.as_seed("seed", seed)))
    x, y, count = np.asarray(x)[order], np.asarray(y)[order], int(len(x) * (1 - test_split))
    return (x[:count], y[:count]), (x[count:], y[count:])


def shuffled(count: int, random: np.random.RandomState) -> np.ndarray:
    """Returns the numbers below `count` in a random order."""
    order = np.arange(count)
    random.shuffle(order)
    return order


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
