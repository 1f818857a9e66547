"""Diabetes: ten scaled measurements of 442 patients, and how the disease went on."""

from __future__ import annotations

from trainer.datasets.keras_files import Split, shuffled_split
from trainer.datasets.scikit_learn import bundled


def load_data(test_split: float = 0.2, seed: int = 113) -> Split:
    """Returns measurements, float64 `(rows, 10)`, and the progression in a year, `(rows,)`, to train on and to test on.

    They come with scikit-learn: nothing is downloaded.

    Args:
      test_split: the share of the rows to test on.
      seed: of their order.

    Raises:
      ImportError: without scikit-learn.

    Source: scikit-learn's `sklearn.datasets`.
    """
    found = bundled("load_diabetes")
    return shuffled_split(found.data, found.target, test_split, seed)
