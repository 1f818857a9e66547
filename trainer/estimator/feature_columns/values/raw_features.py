"""Raw features of a batch, read by key and checked.

Owns the rules for strings, integers and missing values. Error messages name the feature, but never show its values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from trainer.core.categories.vocabularies import is_missing
from trainer.core.errors import describe, near_hint
from trainer.estimator.feature_columns.values.checks import as_text

MISSING_TEXT = b""
MISSING_NUMBER = -1


class RawFeatures:
    """Features of a batch, by key: arrays, rows first.

    Each array is converted once, for any number of columns.

    Args:
      features: arrays of numbers or strings, or objects that NumPy converts to arrays.

    Raises:
      TypeError: if `features` is not a dict.
    """

    def __init__(self, features: Mapping[str, Any]):
        if not isinstance(features, Mapping):
            raise TypeError("Feature columns read features by name: give a dict of arrays, such as {'age': ages}, also "
                            f"where there is one feature. Received: {describe(features)}.")
        self._features = features
        self._done: dict[Hashable, Any] = {}
        self._rows: tuple[str, int] | None = None

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Returns the cached result of `compute` for `key`; calls `compute` the first time."""
        if key not in self._done:
            self._done[key] = compute()
        return self._done[key]

    def array(self, key: str) -> np.ndarray:
        """Returns an unconverted feature with at least two axes: `(rows,)` becomes `(rows, 1)`.

        Raises:
          ValueError: if the feature is missing, has no rows, or differs from other features in the number of rows.
        """
        return self.once(("array", key), lambda: self._array(key))

    def numbers(self, key: str) -> np.ndarray:
        """Returns a feature as float32; None becomes NaN.

        Raises:
          ValueError: if the feature is missing or not numeric.
        """
        return self.once(("numbers", key), lambda: self._numbers(key))

    def categories(self, key: str) -> np.ndarray:
        """Returns a feature as int64, or as an object array of bytes.

        In object arrays, None and NaN are missing values: -1 for integers, the empty string otherwise.

        Raises:
          ValueError: if the feature is missing, or has values other than strings or integers.
        """
        return self.once(("categories", key), lambda: self._categories(key))

    def _array(self, key: str) -> np.ndarray:
        if key not in self._features:
            raise ValueError(f"The features have no {key!r}. {near_hint(key, map(str, self._features))}")
        array = np.asarray(self._features[key])
        if array.ndim == 0:
            raise ValueError(f"Feature {key!r} has no rows: it is {describe(array)}. Give whole batches, of shape "
                             "`(rows,)` or `(rows, values)`.")
        if self._rows is None:
            self._rows = key, len(array)
        if len(array) != self._rows[1]:
            raise ValueError(f"Feature {key!r} has {len(array)} rows, and {self._rows[0]!r} {self._rows[1]}. All "
                             "features of a batch must have as many.")
        return array[:, None] if array.ndim == 1 else array

    def _numbers(self, key: str) -> np.ndarray:
        array = self.array(key)
        if array.dtype.kind in "SU":
            raise _wrong_values(key, array, "numbers", "Give numbers, or use a categorical column.")
        try:
            return array.astype(np.float32)
        except (TypeError, ValueError) as error:
            raise _wrong_values(key, array, "numbers", "Give an array of one shape and a numeric dtype.") from error

    def _categories(self, key: str) -> np.ndarray:
        array = self.array(key)
        kind = array.dtype.kind
        if kind in "iu":
            return array.astype(np.int64)
        if kind in "SU":
            return _as_objects([as_text(text) for text in array.ravel().tolist()], array.shape)
        if kind == "O":
            return self._categories_of_objects(key, array)
        raise _wrong_values(key, array, "strings or whole numbers", "Convert it, by `astype(str)` or `astype(int)`, or "
                            "use a numeric or bucketized column.")

    def _categories_of_objects(self, key: str, array: np.ndarray) -> np.ndarray:
        values = array.ravel().tolist()
        kinds = {type(value) for value in values}
        if kinds <= {str, bytes}:
            return _as_objects([as_text(text) for text in values], array.shape)
        present = [None if is_missing(value) else value for value in values]
        if all(isinstance(value, (str, bytes)) for value in present if value is not None):
            return _as_objects([MISSING_TEXT if value is None else as_text(value) for value in present], array.shape)
        if all(isinstance(value, (int, np.integer)) for value in present if value is not None):
            numbers = [MISSING_NUMBER if value is None else value for value in present]
            return np.array(numbers, np.int64).reshape(array.shape)
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"Feature {key!r} must hold strings or whole numbers. Received: an array of objects of types "
                         f"{names}. Convert it, by `astype(str)`.")


def missing_in(categories: np.ndarray) -> np.ndarray:
    """Returns a mask of a dense feature's missing values, as in TensorFlow: "" for strings, -1 for integers.

    Args:
      categories: array from `RawFeatures.categories`.

    Returns:
      Bool array of the same shape.
    """
    return categories == (MISSING_TEXT if categories.dtype == object else MISSING_NUMBER)


def _as_objects(texts: list[bytes], shape: tuple[int, ...]) -> np.ndarray:
    objects = np.empty(len(texts), object)
    objects[:] = texts
    return objects.reshape(shape)


def _wrong_values(key: str, array: np.ndarray, expected: str, fix: str) -> ValueError:
    return ValueError(f"Feature {key!r} must hold {expected}. Received: {describe(array)}. {fix}")
