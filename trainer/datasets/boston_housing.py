"""Prices of houses in Boston: 506 rows. One of its columns encodes race; it serves to discuss that alone."""

from __future__ import annotations

import os

from trainer.datasets.keras_files import Split, npz_arrays, path_of, shuffled_split

_SHA256 = "f553886a1f8d56431e820c5b82552d9d95cfcb96d1e678153f8839538947dff5"


def load_data(path: str | os.PathLike[str] = "boston_housing.npz", test_split: float = 0.2, seed: int = 113) -> Split:
    """Returns 13 numbers of each place, and the median price of its houses in thousands of dollars.

    Args:
      path: the name of the file in the cache folder, or the path of a copy of it; see `mnist.load_data`.
      test_split: the share of the rows to test on.
      seed: of their order.

    Source: https://keras.io/api/datasets/boston_housing/.
    """
    x, y = npz_arrays(path_of(path, _SHA256, "boston_housing.npz"), "x", "y")
    return shuffled_split(x, y, test_split, seed)
