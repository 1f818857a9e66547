"""Fashion-MNIST: 70,000 images of clothes, in ten classes."""

from __future__ import annotations

import os

from trainer.datasets.keras_files import ORIGIN, Split, files_in, idx_array
from trainer.utils.files.get_file import get_file

_FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz",
          "t10k-labels-idx1-ubyte.gz")


def load_data(path: str | os.PathLike[str] | None = None) -> Split:
    """Returns 60,000 images to train on and 10,000 to test on: uint8, `(rows, 28, 28)`, and labels `(rows,)`.

    Args:
      path: a folder with the four files; by default `datasets/fashion-mnist` in the cache folder, to which they are
        downloaded if need be.

    Source: https://keras.io/api/datasets/fashion_mnist/.
    """
    if path is None:
        paths = [get_file(name, ORIGIN + name, cache_subdir=os.path.join("datasets", "fashion-mnist"))
                 for name in _FILES]
    else:
        paths = files_in(path, _FILES)
    x_train, y_train, x_test, y_test = map(idx_array, paths)
    return (x_train, y_train), (x_test, y_test)
