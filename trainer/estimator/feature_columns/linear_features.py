"""LinearFeatures: the wide part of a model, a weight for each number and each id."""

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
    """The tables of embedding columns, below a name of their own, as weights have the columns' names."""

    columns: Sequence[FeatureColumn]

    @nn.compact
    def __call__(self) -> dict:
        """Returns the tables."""
        return dict(tables_of(self.columns))


class LinearFeatures(nn.Module):
    """A Flax module that is linear in numbers and ids: the sum over columns of weights, plus a bias.

    Parameters, all zeros at first: `<name>/weights` of shape `(width or buckets, units)` for each column, and `bias` of
    shape `(units,)`. Tables of embedding columns are `embeddings/<name>/embedding`.

    Args:
      columns: dense columns and categorical columns, these as they are; none of sequences.
      units: how many numbers a row gets.
      sparse_combiner: how the weights of several ids of one column are combined: "sum", "mean" or "sqrtn".

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if a column is of sequences, there are none, or two have one name; or if `sparse_combiner` is unknown.

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
          features: what `HostTransform` returned.

        Raises:
          TypeError: if it is no dict.
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
