"""The categorical column with weighted values."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jax.typing import DTypeLike

from trainer.core.calls.entry_points import explains_arguments
from trainer.estimator.feature_columns.base import (
    CategoricalColumn,
    Features,
    HostFeature,
    IdsAndWeights,
    as_categorical,
    read_feature,
)
from trainer.estimator.feature_columns.values import checks
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


@dataclasses.dataclass(frozen=True)
class Weights(HostFeature):
    """Weights of a column's values, float32 of the shape of its ids."""

    column: CategoricalColumn
    weight_feature_key: str

    @property
    def output_key(self) -> str:
        return f"{self.column.name}_weighted_by_{self.weight_feature_key}/weights"

    def read(self, raw: RawFeatures) -> np.ndarray:
        """Returns the weights.

        Raises:
          ValueError: if the weights are missing, or differ in shape from the values.
        """
        weights, present = raw.numbers(self.weight_feature_key), self.column.is_present(raw)
        if weights.shape != present.shape:
            raise ValueError(f"Feature {self.weight_feature_key!r} must have a weight for each value of column "
                             f"{self.column.name!r}, of shape {present.shape}. Received: shape {weights.shape}.")
        return weights


@dataclasses.dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """Column of `weighted_categorical_column`."""

    is_crossable: ClassVar[bool] = False

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def host_features(self) -> tuple[HostFeature, ...]:
        return (*self.categorical_column.host_features, self._weights)

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def ids_and_weights(self, features: Features) -> IdsAndWeights:
        ids, _ = self.categorical_column.ids_and_weights(features)
        return IdsAndWeights(ids, read_feature(features, self._weights.output_key, self.name))

    def host_ids(self, raw: RawFeatures) -> np.ndarray:
        return self.categorical_column.host_ids(raw)

    def is_present(self, raw: RawFeatures) -> np.ndarray:
        return self.categorical_column.is_present(raw)

    @property
    def _weights(self) -> Weights:
        return Weights(self.categorical_column, self.weight_feature_key)


@explains_arguments
def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: DTypeLike = "float32"
) -> WeightedCategoricalColumn:
    """Returns a categorical column with a weight for each value, from another feature.

    Embeddings with the combiners "mean" and "sqrtn" ignore weights of 0 and less.

    Args:
      categorical_column: column of the values.
      weight_feature_key: key of the feature with the weights, in the shape of the values.
      dtype: dtype of the weights; the model receives float32.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `dtype` is not numeric, or the column is already weighted or of sequences.

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
