"""The files of Keras's data sets: in its cache folder, downloaded, or at a path of the user's."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.errors import naming_file
from trainer.utils.files import object_stream
from trainer.utils.files.get_file import get_file

Split = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""`(x_train, y_train), (x_test, y_test)`."""

ORIGIN = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"


def path_of(path: str | os.PathLike[str], file_hash: str, name: str) -> str:
    """Returns the path of a file, which is downloaded if need be.

    Args:
      path: a name in the cache folder; or with folders, that of a file which is there.
      file_hash: of the file that Keras downloads, for one in the cache folder.
      name: of that file on Keras's server.
    """
    path = arguments.as_path("path", path)
    if not os.path.dirname(path):
        return get_file(path, ORIGIN + name, file_hash=file_hash)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"`path` must be a name in the cache folder, such as {name!r}, or the path of a copy "
                                f"of the file. Received: {path!r}, where there is no file.")
    return path


def files_in(path: str | os.PathLike[str], names: Sequence[str]) -> list[str]:
    """Returns the paths of files in a folder.

    Raises:
      FileNotFoundError: if one is missing.
    """
    folder = arguments.as_path("path", path, "a folder")
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise FileNotFoundError(f"`path` must be a folder with the files {', '.join(map(repr, names))}. Received: "
                                f"{folder!r}, where there is no {missing[0]!r}.")
    return [os.path.join(folder, name) for name in names]


def npz_arrays(path: str, *names: str) -> list[np.ndarray]:
    """Returns arrays of an `.npz` file, those of objects included, by name."""
    with naming_file(path):
        if not zipfile.is_zipfile(path):
            raise ValueError("The file is no zip archive, as `.npz` files are.")
        with zipfile.ZipFile(path) as archive:
            return [_array(archive.read(f"{name}.npy")) for name in names]


def _array(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                   else np.lib.format.read_array_header_2_0)
    if not read_header(file)[2].hasobject:
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    return np.asarray(object_stream.parse(data[file.tell():]))


def idx_array(path: str) -> np.ndarray:
    """Returns the array of a gzipped file in the format that MNIST was published in."""
    with naming_file(path), gzip.open(path, "rb") as file:
        data = file.read()
        kind, dimensions = data[2], data[3]
        shape = np.frombuffer(data, ">u4", dimensions, 4)
        if data[:2] != b"\0\0" or kind != 8:
            raise ValueError("The file does not begin as those of MNIST do.")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def cifar_batches(paths: list[str], labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, channels last, and the labels, `(rows, 1)`, of files of CIFAR."""
    images, classes = [], []
    for path in paths:
        with naming_file(path), open(path, "rb") as file:
            batch = {_text(key): value for key, value in object_stream.parse(file.read()).items()}
            images.append(np.asarray(batch["data"]).reshape(-1, 3, 32, 32))
            classes.append(np.asarray(batch[labels], np.uint8))
    return np.concatenate(images).transpose(0, 2, 3, 1), np.concatenate(classes)[:, None]


def shuffled_split(x: Any, y: Any, test_split: float, seed: int) -> Split:
    """Returns rows in Keras's order for a seed, the last ones as the part to test on."""
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
