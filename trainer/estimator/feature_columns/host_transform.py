"""HostTransform: converts the raw features of a batch to arrays of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainer.estimator.feature_columns.base import FeatureColumn, HostFeature, listed_columns
from trainer.estimator.feature_columns.sequence import Lengths
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


class HostTransform:
    """Converts raw features to arrays of numbers, on the host.

    The result depends only on the features, so the transform may run in any thread, on batches or whole arrays.
    Categories become int32 ids, and numbers become float32. Features that no column reads are dropped. In dense arrays,
    "" and -1 are missing values of strings and integers; they get the id -1.

    Args:
      columns: all feature columns of the model, including both parts of a wide and deep model; repeated columns count
        once.

    Raises:
      TypeError: if an element of `columns` is not a feature column.
      ValueError: if there are no columns, or two different columns produce arrays with the same key.

    Example:
      >>> from trainer.estimator.feature_columns import categorical_column_with_vocabulary_list, numeric_column
      >>> colors = categorical_column_with_vocabulary_list("color", ["red", "green"])
      >>> transform = HostTransform([colors, numeric_column("price")])
      >>> features = transform({"color": np.array(["green", "blue"]), "price": [1, 2], "seller": ["a", "b"]})
      >>> {key: array.tolist() for key, array in features.items()}
      {'color/vocabulary_2': [[1], [-1]], 'price': [[1.0], [2.0]]}
    """

    def __init__(self, columns: FeatureColumn | Iterable[FeatureColumn]):
        self.columns = listed_columns(columns)
        self._features: dict[str, HostFeature] = {}
        for column in self.columns:
            for feature in column.host_features:
                known = self._features.setdefault(feature.output_key, feature)
                if known != feature:
                    raise ValueError(f"Column {column.name!r} and another would both give the device an array "
                                     f"{feature.output_key!r}: {known} and {feature}. Give the feature "
                                     "under another key too.")

    def __call__(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the arrays of numbers by key, rows first.

        Args:
          features: arrays by key, with the same number of rows.

        Raises:
          TypeError: if `features` is not a dict.
          ValueError: if a feature is missing, has unsupported values or the wrong shape, or if columns of sequences
            differ in length.
        """
        raw = RawFeatures(features)
        arrays = {key: feature.read(raw) for key, feature in self._features.items()}
        self._check_lengths(arrays)
        return arrays

    def __repr__(self) -> str:
        return f"HostTransform({[column.name for column in self.columns]})"

    def _check_lengths(self, arrays: Mapping[str, np.ndarray]) -> None:
        keys = [key for key, feature in self._features.items() if isinstance(feature, Lengths)]
        for key in keys[1:]:
            rows = np.flatnonzero(arrays[keys[0]] != arrays[key])
            if rows.size:
                raise ValueError(f"Sequences differ in length: {keys[0]!r} and {key!r} in {rows.size} rows, first in "
                                 f"row {rows[0]}. Give columns of other sequences a `HostTransform` of their own, and "
                                 "merge what they return.")
