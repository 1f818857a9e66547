"""CIFAR-10: 60,000 small images in ten classes."""

from __future__ import annotations

import os

from trainer.core import arguments
from trainer.datasets.keras_files import Split, cifar_batches, files_in
from trainer.utils.files.get_file import get_file

_ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"


def load_data(path: str | os.PathLike[str] | None = None) -> Split:
    """Returns 50,000 images to train on and 10,000 to test on: uint8, `(rows, 32, 32, 3)`, and labels `(rows, 1)`.

    Args:
      path: the folder `cifar-10-batches-py`, or one that holds it; by default in the cache folder, to which it is
        downloaded if need be.

    Source: https://keras.io/api/datasets/cifar10/.
    """
    folder = (get_file("cifar-10-batches-py-target", _ORIGIN, extract=True, file_hash=_SHA256) if path is None
              else arguments.as_path("path", path, "a folder"))
    inner = os.path.join(folder, "cifar-10-batches-py")
    folder = inner if os.path.isdir(inner) else folder
    *train, test = files_in(folder, [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"])
    return cifar_batches(train, "labels"), cifar_batches([test], "labels")
