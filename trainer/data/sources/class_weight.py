"""Class weights as row weights."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import numpy as np

from trainer.core import arguments
from trainer.core.errors import describe, wrong_type
from trainer.core.types import PyTree
from trainer.data.sources.arrays import DataError

_SUM_TOLERANCE = 0.01  # for distributions with 8-bit precision


class ClassWeights:
    """Converts labels to row weights.

    Args:
      class_weight: a dict from the integer label of a class to its weight. Missing classes have the weight 1.

    Raises:
      TypeError: if `class_weight` is not a dict from integers to numbers.
      ValueError: if it is empty, or a weight is not finite.
    """

    def __init__(self, class_weight: Mapping[int, float]):
        if not isinstance(class_weight, Mapping):
            raise wrong_type("class_weight", class_weight, "a dict with integer keys, one for each class")
        if not class_weight:
            raise ValueError("`class_weight` is empty. Give the weight of at least one class.")
        for label, weight in class_weight.items():
            if isinstance(label, (bool, np.bool_)) or not isinstance(label, numbers.Integral):
                raise wrong_type("class_weight", label, "a dict with integer keys, one for each class")
            arguments.require_finite(**{f"class_weight[{label}]": weight})
        labels = sorted(class_weight)
        self._labels = np.array(labels)
        self._weights = np.array([class_weight[label] for label in labels], np.float32)

    def __call__(self, y: PyTree) -> np.ndarray:
        """Returns the weight of each row; float32, shape `(rows,)`.

        Args:
          y: labels, a NumPy array of shape `(rows,)` or `(rows, 1)`, which are rounded; or of shape `(rows, classes)`,
            where each row is one-hot or another distribution, such as a smoothed label, and the likeliest class counts.

        Raises:
          DataError: if `y` is not an array of such a shape, or a row with several numbers is not a distribution.
        """
        if not isinstance(y, np.ndarray):
            raise DataError(f"`class_weight` needs `y` to be a single array of labels. Received: {describe(y)}.")
        if y.ndim > 2:
            raise DataError("`class_weight` needs `y` of shape (rows,), (rows, 1) or (rows, classes). "
                            f"Received: {describe(y)}. Pass `sample_weight` instead.")
        labels = _likeliest_classes(y) if y.ndim == 2 and y.shape[1] > 1 else y.reshape(-1)
        if labels.dtype.kind == "f":  # a smoothed label is rounded to the nearest class, as in Keras
            labels = np.round(labels)
        slots = np.searchsorted(self._labels, labels).clip(max=len(self._labels) - 1)
        return np.where(self._labels[slots] == labels, self._weights[slots], np.float32(1.0))


def _likeliest_classes(y: np.ndarray) -> np.ndarray:
    # The maximum of several labels in a row, as in a sequence or for multiple classes, is not a class.
    is_distribution = (y.min(axis=-1) >= 0) & (abs(y.sum(axis=-1, dtype=np.float64) - 1) <= _SUM_TOLERANCE)
    if not is_distribution.all():
        raise DataError("`class_weight` needs one class for each row: with `y` of shape (rows, classes), rows that are "
                        f"one-hot or add up to 1. Received: {describe(y)}, of which {np.sum(~is_distribution)} of "
                        f"{len(y)} rows do not. Where rows hold several labels, pass `sample_weight` instead.")
    return y.argmax(axis=-1)
