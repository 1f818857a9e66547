"""CIFAR-100: 60,000 small images in a hundred classes, or in twenty groups of these."""

from __future__ import annotations

import os

from trainer.core import arguments
from trainer.datasets.keras_files import Split, cifar_batches, files_in
from trainer.utils.files.get_file import get_file

_ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
_SHA256 = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"


def load_data(label_mode: str = "fine", path: str | os.PathLike[str] | None = None) -> Split:
    """Returns 50,000 images to train on and 10,000 to test on: uint8, `(rows, 32, 32, 3)`, and labels `(rows, 1)`.

    Args:
      label_mode: "fine" for the classes, "coarse" for their groups.
      path: the folder `cifar-100-python`, or one that holds it; by default in the cache folder, to which it is
        downloaded if need be.

    Source: https://keras.io/api/datasets/cifar100/.
    """
    arguments.check_word("label_mode", label_mode, ("fine", "coarse"))
    folder = (get_file("cifar-100-python-target", _ORIGIN, extract=True, file_hash=_SHA256) if path is None
              else arguments.as_path("path", path, "a folder"))
    inner = os.path.join(folder, "cifar-100-python")
    folder = inner if os.path.isdir(inner) else folder
    train, test = (cifar_batches([file], f"{label_mode}_labels") for file in files_in(folder, ["train", "test"]))
    return train, test
