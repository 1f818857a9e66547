"""Images: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import os

from trainer.core import arguments
from trainer.datasets.keras_files import (
    ORIGIN,
    Split,
    archive_folder,
    cifar_batches,
    files_in,
    idx_array,
    npz_arrays,
    path_of,
)
from trainer.utils.files.get_file import get_file


class mnist:
    """MNIST: 70,000 handwritten digits."""

    @staticmethod
    def load_data(path: str | os.PathLike[str] = "mnist.npz") -> Split:
        """Returns 60,000 images to train on and 10,000 to test on: uint8, `(rows, 28, 28)`, and labels `(rows,)`.

        Args:
          path: name of the file in the cache folder, `$KERAS_HOME/datasets` or `~/.keras/datasets`, to which it is
            downloaded if missing; or the path of a copy, with its folder.

        Source: https://keras.io/api/datasets/mnist/.
        """
        x_train, y_train, x_test, y_test = npz_arrays(
            path_of(path, "mnist.npz"), "x_train", "y_train", "x_test", "y_test")
        return (x_train, y_train), (x_test, y_test)


class fashion_mnist:
    """Fashion-MNIST: 70,000 images of clothes, in ten classes."""

    @staticmethod
    def load_data(path: str | os.PathLike[str] | None = None) -> Split:
        """Returns 60,000 images to train on and 10,000 to test on: uint8, `(rows, 28, 28)`, and labels `(rows,)`.

        Args:
          path: folder with the four files; by default `datasets/fashion-mnist` in the cache folder, to which they are
            downloaded if missing.

        Source: https://keras.io/api/datasets/fashion_mnist/.
        """
        names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz",
                 "t10k-labels-idx1-ubyte.gz")
        if path is None:
            folder = os.path.join("datasets", "fashion-mnist")
            paths = [get_file(name, ORIGIN + name, cache_subdir=folder) for name in names]
        else:
            paths = files_in(path, names)
        x_train, y_train, x_test, y_test = map(idx_array, paths)
        return (x_train, y_train), (x_test, y_test)


class cifar10:
    """CIFAR-10: 60,000 small images in ten classes."""

    @staticmethod
    def load_data(path: str | os.PathLike[str] | None = None) -> Split:
        """Returns 50,000 images to train on and 10,000 to test on: uint8, `(rows, 32, 32, 3)`, and labels `(rows, 1)`.

        Args:
          path: folder `cifar-10-batches-py`, or its parent folder; by default in the cache folder, to which it is
            downloaded if missing.

        Source: https://keras.io/api/datasets/cifar10/.
        """
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        *train, test = files_in(archive_folder(path, "cifar-10"), names)
        return cifar_batches(train, "labels"), cifar_batches([test], "labels")


class cifar100:
    """CIFAR-100: 60,000 small images in a hundred classes, or in twenty groups of these."""

    @staticmethod
    def load_data(label_mode: str = "fine", path: str | os.PathLike[str] | None = None) -> Split:
        """Returns 50,000 images to train on and 10,000 to test on: uint8, `(rows, 32, 32, 3)`, and labels `(rows, 1)`.

        Args:
          label_mode: "fine" for the classes, "coarse" for their groups.
          path: folder `cifar-100-python`, or its parent folder; by default in the cache folder, to which it is
            downloaded if missing.

        Source: https://keras.io/api/datasets/cifar100/.
        """
        arguments.check_word("label_mode", label_mode, ("fine", "coarse"))
        folder = archive_folder(path, "cifar-100")
        train, test = (cifar_batches([file], f"{label_mode}_labels") for file in files_in(folder, ["train", "test"]))
        return train, test
