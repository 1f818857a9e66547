"""Class weights as row weights."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping

import numpy as np

from trainer.core import arguments
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import describe, wrong_type
from trainer.core.types import PyTree
from trainer.data.sources.arrays import DataError

_SUM_TOLERANCE = 0.01  # for distributions with 8-bit precision


_EXPECTED = "a dict with integer keys, one for each class, such as `{0: 1.0, 1: 2.5}`"


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
            raise wrong_type("class_weight", class_weight, _EXPECTED)
        if not class_weight:
            raise ValueError("`class_weight` is empty. Give the weight of at least one class.")
        for label, weight in class_weight.items():
            if isinstance(label, (bool, np.bool_)) or not isinstance(label, numbers.Integral):
                raise wrong_type("class_weight", label, _EXPECTED)
            arguments.require_finite(**{f"class_weight[{label}]": weight})
        labels = sorted(class_weight)
        self._labels = np.array(labels)
        self._weights = np.array([class_weight[label] for label in labels], np.float32)
        self._is_seen = np.zeros(len(labels), bool)

    def __call__(self, y: PyTree) -> np.ndarray:
        """Returns the weight of each row; float32, shape `(rows,)`.

        Args:
          y: labels, a NumPy array of shape `(rows,)` or `(rows, 1)`: whole numbers, or numbers from 0 to 1, which are
            rounded; or of shape `(rows, classes)`, where each row is one-hot or another distribution, such as a
            smoothed label, and the likeliest class counts.

        Raises:
          DataError: if `y` is not an array of such a shape, a row with several numbers is not a distribution, or a
            number is not a class.
        """
        if not isinstance(y, np.ndarray):
            raise DataError(f"`class_weight` needs `y` to be a single array of labels. Received: {describe(y)}.")
        if y.ndim > 2:
            raise DataError("`class_weight` needs `y` of shape (rows,), (rows, 1) or (rows, classes). "
                            f"Received: {describe(y)}. Pass `sample_weight` instead.")
        labels = _likeliest_classes(y) if y.ndim == 2 and y.shape[1] > 1 else y.reshape(-1)
        if labels.dtype.kind == "f":  # a smoothed label is rounded to the nearest class, as in Keras
            labels = _rounded(labels)
        slots = np.searchsorted(self._labels, labels).clip(max=len(self._labels) - 1)
        is_weighted = self._labels[slots] == labels
        self._is_seen[slots[is_weighted]] = True
        return np.where(is_weighted, self._weights[slots], np.float32(1.0))

    def warn_of_unseen(self) -> None:
        """Warns, once, of classes with a weight that no label so far has had."""
        unseen = self._labels[~self._is_seen].tolist()
        if unseen:
            warnings.warn(f"`class_weight` has weights of {', '.join(map(str, unseen))}, which no label in `y` is. Its "
                          "keys are the labels as `y` has them, mostly numbered from 0.", stacklevel=user_stacklevel())
            self._is_seen[:] = True


def _rounded(labels: np.ndarray) -> np.ndarray:
    rounded = np.round(labels)
    is_class = (rounded == labels) | ((labels >= 0) & (labels <= 1))
    if not is_class.all():
        raise DataError("`class_weight` needs labels that are classes: whole numbers, or numbers from 0 to 1. "
                        f"Received: the label {labels[~is_class][0]:g}. For a regression, pass `sample_weight`.")
    return rounded


def _likeliest_classes(y: np.ndarray) -> np.ndarray:
    # The maximum of several labels in a row, as in a sequence or for multiple classes, is not a class.
    is_distribution = (y.min(axis=-1) >= 0) & (abs(y.sum(axis=-1, dtype=np.float64) - 1) <= _SUM_TOLERANCE)
    if not is_distribution.all():
        raise DataError("`class_weight` needs one class for each row: with `y` of shape (rows, classes), rows that are "
                        f"one-hot or add up to 1. Received: {describe(y)}, of which {np.sum(~is_distribution)} of "
                        f"{len(y)} rows do not. Where rows hold several labels, pass `sample_weight` instead.")
    return y.argmax(axis=-1)
