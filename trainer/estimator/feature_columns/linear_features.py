"""LinearFeatures: the linear part of a model, with a weight per number and id."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.core import arguments
from trainer.estimator.feature_columns.base import CategoricalColumn, DenseColumn, FeatureColumn, Features, as_columns
from trainer.estimator.feature_columns.combining import COMBINERS, combine_rows
from trainer.estimator.feature_columns.parameters import check_features, check_tables, tables_of, weights_of

_BIAS = "bias"


class _Tables(nn.Module):
    """The tables of embedding columns, in a submodule because the columns' weights already use the columns' names."""

    columns: Sequence[FeatureColumn]

    @nn.compact
    def __call__(self) -> dict:
        """Returns the tables."""
        return dict(tables_of(self.columns))


class LinearFeatures(nn.Module):
    """Flax module that is linear in numbers and ids: the sum of weights over all columns, plus a bias.

    Parameters, all initialized to zero: `<name>/weights` of shape `(width or buckets, units)` for each column, and
    `bias` of shape `(units,)`. Tables of embedding columns are `embeddings/<name>/embedding`.

    Args:
      columns: dense and categorical columns, except sequences. Categorical columns need no wrapper.
      units: number of outputs per row.
      sparse_combiner: reduction over the weights of a column's ids in a row: "sum", "mean" or "sqrtn".

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if a column is of sequences, there are no columns, two columns have the same name, or
        `sparse_combiner` is unknown.

    Example:
      >>> from trainer.estimator.feature_columns import HostTransform, categorical_column_with_identity
      >>> columns = [categorical_column_with_identity("weekday", 7)]
      >>> features = HostTransform(columns)({"weekday": [0, 6]})
      >>> y, variables = LinearFeatures(columns).init_with_output(jax.random.key(0), features)
      >>> y.tolist(), variables["params"]["weekday"]["weights"].shape
      ([[0.0], [0.0]], (7, 1))

    Source: `LinearModel` of TensorFlow's Estimator 2.15.
    """

    columns: Sequence[FeatureColumn]
    units: int = 1
    sparse_combiner: str = "sum"

    def __post_init__(self) -> None:
        arguments.check_count("units", self.units)
        arguments.check_word("sparse_combiner", self.sparse_combiner, COMBINERS)
        columns = as_columns(self.columns)
        for column in columns:
            if column.lengths_key is not None:
                raise ValueError(f"Column {column.name!r} is of sequences, in which no linear model is. Use a column "
                                 "that is not.")
            if column.name == _BIAS:
                raise ValueError("A column cannot have the name 'bias', which the bias has. Give the feature another "
                                 "key.")
        check_tables(columns)
        object.__setattr__(self, "columns", columns)  # a tuple, so that modules can be hashed
        super().__post_init__()

    @nn.compact
    def __call__(self, features: Features) -> jax.Array:
        """Returns float32 of shape `(rows, units)`.

        Args:
          features: arrays from `HostTransform`, by key.

        Raises:
          TypeError: if `features` is not a dict.
          ValueError: if an array is missing.
        """
        check_features(features)
        columns = as_columns(self.columns)
        tables = _Tables(columns, name="embeddings")() if check_tables(columns) else {}
        sums = []
        for column in columns:
            weights = weights_of(column, self.units)
            if isinstance(column, CategoricalColumn):
                sums.append(combine_rows(weights, column.ids_and_weights(features), self.sparse_combiner))
            elif isinstance(column, DenseColumn):
                sums.append(jnp.matmul(column.dense(features, tables), weights, precision=jax.lax.Precision.HIGHEST))
        bias = self.param(_BIAS, nn.initializers.zeros, (self.units,), jnp.float32)
        return sum(sums[1:], sums[0]) + bias
