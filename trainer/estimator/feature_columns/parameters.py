"""Shared parts of the input layers: checks of columns, and the parameters of tables and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.core.errors import describe
from trainer.estimator.feature_columns.base import (
    CategoricalColumn,
    DenseColumn,
    FeatureColumn,
    Features,
    Table,
    Tables,
    as_columns,
)

NON_TRAINABLE = "non_trainable"  # collection of frozen tables


def as_dense_columns(columns: FeatureColumn | Iterable[FeatureColumn]) -> tuple[DenseColumn, ...]:
    """Returns dense columns, sorted by name.

    Raises:
      TypeError: if an element of `columns` is not a feature column.
      ValueError: if a column is categorical, there are no columns, or names of columns or tables clash.
    """
    found = []
    for column in as_columns(columns):
        if not isinstance(column, DenseColumn):
            raise ValueError(f"Column {column.name!r} is categorical: {column}. You can wrap a categorical column with "
                             "an `embedding_column` or `indicator_column`.")
        found.append(column)
    check_tables(found)
    return tuple(found)


def check_tables(columns: Iterable[FeatureColumn]) -> tuple[Table, ...]:
    """Returns the distinct tables of columns.

    Raises:
      ValueError: if two different tables have the same name.
    """
    names: dict[str, Table] = {}
    for column in columns:
        for table in column.tables if isinstance(column, DenseColumn) else ():
            if names.setdefault(table.name, table) != table:
                raise ValueError(f"Two different tables have the name {table.name!r}. Give one of them another "
                                 "`shared_embedding_collection_name`.")
    return tuple(names.values())


def check_features(features: Features) -> None:
    """Raises TypeError if `features` is not a dict."""
    if not hasattr(features, "keys"):
        raise TypeError("Feature columns read features by name: give the dict that `HostTransform` returns. Received: "
                        f"{describe(features)}.")


class _Embedding(nn.Module):
    """A table as the parameter `embedding`."""

    table: Table

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the table, float32 of shape `(rows, width)`."""
        shape = (self.table.rows, self.table.width)
        initializer = self.table.initializer or nn.initializers.truncated_normal(1 / math.sqrt(self.table.width))
        if self.table.trainable:
            return self.param("embedding", initializer, shape, jnp.float32)
        return self.variable(NON_TRAINABLE, "embedding", lambda: initializer(
            self.make_rng("params"), shape, jnp.float32)).value


def tables_of(columns: Iterable[FeatureColumn]) -> Tables:
    """Returns the tables of columns, as parameters `<name>/embedding` of the calling module."""
    return {table: _Embedding(table, name=table.name)() for table in check_tables(columns)}


class _Weights(nn.Module):
    """The weights of a linear model's column, as the parameter `weights`."""

    rows: int
    units: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the weights, float32 of shape `(rows, units)`, initialized to zero."""
        return self.param("weights", nn.initializers.zeros, (self.rows, self.units), jnp.float32)


def weights_of(column: FeatureColumn, units: int) -> jax.Array:
    """Returns the weights of a column, as the parameter `<name>/weights` of the calling module."""
    if isinstance(column, CategoricalColumn):
        rows = column.num_buckets
    else:
        assert isinstance(column, DenseColumn)
        rows = column.width
    return _Weights(rows, units, name=column.name)()
