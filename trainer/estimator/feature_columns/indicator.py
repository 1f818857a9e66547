"""The indicator column: counts of a categorical column's ids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from trainer.core.calls.entry_points import explains_arguments
from trainer.estimator.feature_columns.base import (
    CategoricalColumn,
    DenseOfCategorical,
    Features,
    Tables,
    as_categorical,
)


@dataclasses.dataclass(frozen=True)
class IndicatorColumn(DenseOfCategorical):
    """Column of `indicator_column`."""

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical_column.num_buckets

    def dense(self, features: Features, tables: Tables) -> jax.Array:
        ids, weights = self.categorical_column.ids_and_weights(features)
        hits = jax.nn.one_hot(ids, self.width, dtype=jnp.float32)  # zeros for negative ids
        return jnp.sum(hits if weights is None else hits * weights[..., None], axis=-2)


@explains_arguments
def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Returns a dense column with the count of each id in a row, or the sum of its weights.

    Args:
      categorical_column: a categorical column, also of sequences.

    Raises:
      TypeError: if `categorical_column` is not a categorical column.

    Example:
      >>> from trainer.estimator.feature_columns import categorical_column_with_identity
      >>> indicator_column(categorical_column_with_identity("weekday", 7)).width
      7

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/indicator_column.
    """
    return IndicatorColumn(as_categorical("categorical_column", categorical_column))
