"""Irises: four lengths of 150 flowers, of three kinds."""

from __future__ import annotations

from trainer.datasets.keras_files import Split, shuffled_split
from trainer.datasets.scikit_learn import bundled


def load_data(test_split: float = 0.2, seed: int = 113) -> Split:
    """Returns lengths, float64 `(rows, 4)`, and kinds, `(rows,)`, to train on and to test on.

    They come with scikit-learn: nothing is downloaded.

    Args:
      test_split: the share of the rows to test on.
      seed: of their order.

    Raises:
      ImportError: without scikit-learn.

    Source: scikit-learn's `sklearn.datasets`.
    """
    found = bundled("load_iris")
    return shuffled_split(found.data, found.target, test_split, seed)
