"""MNIST: 70,000 handwritten digits."""

from __future__ import annotations

import os

from trainer.datasets.keras_files import Split, npz_arrays, path_of

_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"


def load_data(path: str | os.PathLike[str] = "mnist.npz") -> Split:
    """Returns 60,000 images to train on and 10,000 to test on: uint8, `(rows, 28, 28)`, and labels `(rows,)`.

    Args:
      path: the name of the file in the cache folder, `$KERAS_HOME/datasets` or `~/.keras/datasets`, to which it is
        downloaded if need be; or the path of a copy of it, with its folder.

    Source: https://keras.io/api/datasets/mnist/.
    """
    x_train, y_train, x_test, y_test = npz_arrays(
        path_of(path, _SHA256, "mnist.npz"), "x_train", "y_train", "x_test", "y_test")
    return (x_train, y_train), (x_test, y_test)
