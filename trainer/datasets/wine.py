"""Wines: 13 measurements of 178 wines, of three growers."""

from __future__ import annotations

from trainer.datasets.keras_files import Split, shuffled_split
from trainer.datasets.scikit_learn import bundled


def load_data(test_split: float = 0.2, seed: int = 113) -> Split:
    """Returns measurements, float64 `(rows, 13)`, and growers, `(rows,)`, to train on and to test on.

    They come with scikit-learn: nothing is downloaded.

    Args:
      test_split: the share of the rows to test on.
      seed: of their order.

    Raises:
      ImportError: without scikit-learn.

    Source: scikit-learn's `sklearn.datasets`.
    """
    found = bundled("load_wine")
    return shuffled_split(found.data, found.target, test_split, seed)
