"""Prices of houses in California: 20,640 rows."""

from __future__ import annotations

import os

from trainer.core.arguments import check_word
from trainer.datasets.keras_files import Split, npz_arrays, path_of, shuffled_split

_SHA256 = "1a2e3a52e0398de6463aebe6f4a8da34fb21fbb6b934cf88c3425e766f2a1a6f"


def load_data(version: str = "large", path: str | os.PathLike[str] = "california_housing.npz", test_split: float = 0.2,
              seed: int = 113) -> Split:
    """Returns 8 numbers of each district, and the median price of its houses in dollars.

    Args:
      version: "large", or "small" for the first 600 rows.
      path: the name of the file in the cache folder, or the path of a copy of it; see `mnist.load_data`.
      test_split: the share of the rows to test on.
      seed: of their order.

    Source: https://keras.io/api/datasets/california_housing/.
    """
    check_word("version", version, ("small", "large"))
    x, y = npz_arrays(path_of(path, _SHA256, "california_housing.npz"), "x", "y")
    if version == "small":
        x, y = x[:600], y[:600]
    return shuffled_split(x, y, test_split, seed)
