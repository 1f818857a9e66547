"""The categorical column whose values count by a weight."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from trainer.estimator.feature_columns.base import (
    CategoricalColumn,
    Features,
    HostPart,
    IdsAndWeights,
    as_categorical,
    read_feature,
)
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


@dataclasses.dataclass(frozen=True)
class Weights(HostPart):
    """The weights of a column's values, float32 of the shape of its ids."""

    column: CategoricalColumn
    weight_feature_key: str

    @property
    def part_key(self) -> str:
        """See `HostPart`."""
        return f"{self.column.name}_weighted_by_{self.weight_feature_key}/weights"

    def read(self, raw: RawFeatures) -> np.ndarray:
        """See `HostPart`.

        Raises:
          ValueError: if there are no weights, or they have another shape than the values.
        """
        weights, present = raw.numbers(self.weight_feature_key), self.column.is_present(raw)
        if weights.shape != present.shape:
            raise ValueError(f"Feature {self.weight_feature_key!r} must have a weight for each value of column "
                             f"{self.column.name!r}, of shape {present.shape}. Received: shape {weights.shape}.")
        return weights


@dataclasses.dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """See `weighted_categorical_column`."""

    is_crossable: ClassVar[bool] = False

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """See `FeatureColumn`."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def host_parts(self) -> tuple[HostPart, ...]:
        """See `FeatureColumn`."""
        return (*self.categorical_column.host_parts, self._weights)

    @property
    def num_buckets(self) -> int:
        """See `CategoricalColumn`."""
        return self.categorical_column.num_buckets

    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        """See `CategoricalColumn`."""
        ids, _ = self.categorical_column.ids_and_weights(features)
        return IdsAndWeights(ids, read_feature(features, self._weights.part_key, self.name))

    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        """See `CategoricalColumn`."""
        return self.categorical_column.host_ids(raw)

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        """See `CategoricalColumn`."""
        return self.categorical_column.is_present(raw)

    @property
    def _weights(self) -> Weights:
        return Weights(self.categorical_column, self.weight_feature_key)


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = "float32"
) -> WeightedCategoricalColumn:
    """Describes a categorical column each of whose values counts by a weight, which is another feature.

    Embeddings by "mean" and "sqrtn" leave values of weights of 0 and less out.

    Args:
      categorical_column: the column of the values.
      weight_feature_key: the key of the feature of the weights, of the shape of the values.
      dtype: the type of the weights; models get float32 of any.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if `dtype` is none of numbers, or the column has weights already or is one of sequences.

    Example:
      >>> from trainer.estimator.feature_columns import categorical_column_with_hash_bucket
      >>> words = categorical_column_with_hash_bucket("words", 1000)
      >>> weighted_categorical_column(words, "frequencies").name
      'words_weighted_by_frequencies'

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/weighted_categorical_column.
    """
    column = as_categorical("categorical_column", categorical_column)
    if not column.is_crossable:
        raise ValueError(f"Column {column.name!r} cannot be weighted: it has weights already, or is one of sequences.")
    return WeightedCategoricalColumn(column, checks.as_key("weight_feature_key", weight_feature_key),
                                     checks.as_numeric_dtype("dtype", dtype))
