"""Handwritten digits: 1,797 images of 8 x 8 pixels."""

from __future__ import annotations

from trainer.datasets.keras_files import Split, shuffled_split
from trainer.datasets.scikit_learn import bundled


def load_data(test_split: float = 0.2, seed: int = 113) -> Split:
    """Returns images, float64 `(rows, 8, 8)` from 0 to 16, and digits, `(rows,)`, to train on and to test on.

    They come with scikit-learn: nothing is downloaded.

    Args:
      test_split: the share of the rows to test on.
      seed: of their order.

    Raises:
      ImportError: without scikit-learn.

    Source: scikit-learn's `sklearn.datasets`.
    """
    found = bundled("load_digits")
    return shuffled_split(found.images, found.target, test_split, seed)
