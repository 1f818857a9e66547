"""What the modules of this room share: their columns, checked, and the tables of embeddings as parameters."""

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

NON_TRAINABLE = "non_trainable"  # the collection of tables that are not trained


def as_dense_columns(columns: FeatureColumn | Iterable[FeatureColumn]) -> tuple[DenseColumn, ...]:
    """Returns dense columns, sorted by name.

    Raises:
      TypeError: if one of them is no feature column.
      ValueError: if one is categorical, there are none, or two have one name or two tables.
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
    """Returns the tables of columns, each once.

    Raises:
      ValueError: if two different ones have one name.
    """
    names: dict[str, Table] = {}
    for column in columns:
        for table in column.tables if isinstance(column, DenseColumn) else ():
            if names.setdefault(table.name, table) != table:
                raise ValueError(f"Two different tables have the name {table.name!r}. Give one of them another "
                                 "`shared_embedding_collection_name`.")
    return tuple(names.values())


def check_features(features: Features) -> None:
    """Raises TypeError unless features are a dict."""
    if not hasattr(features, "keys"):
        raise TypeError("Feature columns read features by name: give the dict that `HostTransform` returns. Received: "
                        f"{describe(features)}.")


class _Embedding(nn.Module):
    """One table, as the parameter `embedding`."""

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
    """Returns the tables of columns, parameters `<name>/embedding` of the module that calls this."""
    return {table: _Embedding(table, name=table.name)() for table in check_tables(columns)}


class _Weights(nn.Module):
    """The weights of one column of a linear model, as the parameter `weights`."""

    rows: int
    units: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the weights, zeros at first; float32 of shape `(rows, units)`."""
        return self.param("weights", nn.initializers.zeros, (self.rows, self.units), jnp.float32)


def weights_of(column: FeatureColumn, units: int) -> jax.Array:
    """Returns a column's weights, the parameter `<name>/weights` of the module that calls this."""
    if isinstance(column, CategoricalColumn):
        rows = column.num_buckets
    else:
        assert isinstance(column, DenseColumn)
        rows = column.width
    return _Weights(rows, units, name=column.name)()
