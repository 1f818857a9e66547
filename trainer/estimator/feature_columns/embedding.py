"""The dense columns that look the ids of categorical columns up in a table of weights, of their own or shared."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from trainer.core import arguments
from trainer.core.errors import wrong_type
from trainer.estimator.feature_columns.base import (
    CategoricalColumn,
    DenseOfCategorical,
    Features,
    Initializer,
    Table,
    Tables,
    as_categorical,
)
from trainer.estimator.feature_columns.combining import COMBINERS, combine_rows


class _OfTable(DenseOfCategorical):
    """What looks ids up in a table of weights."""

    combiner: str
    max_norm: float | None

    @property
    @abc.abstractmethod
    def table(self) -> Table:
        """The table."""

    @property
    def width(self) -> int:
        """See `DenseColumn`."""
        return self.table.width

    @property
    def tables(self) -> tuple[Table, ...]:
        """See `DenseColumn`."""
        return (self.table,)

    def dense(self, features: Features, tables: Tables) -> jax.Array:
        """See `DenseColumn`."""
        which = self.categorical_column.ids_and_weights(features)
        return combine_rows(tables[self.table], which, self.combiner, self.max_norm)


@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(_OfTable):
    """See `embedding_column`."""

    dimension: int
    combiner: str = "mean"
    initializer: Initializer | None = None
    max_norm: float | None = None
    trainable: bool = True

    @property
    def name(self) -> str:
        """See `FeatureColumn`."""
        return f"{self.categorical_column.name}_embedding"

    @property
    def table(self) -> Table:
        """The table that it looks ids up in."""
        return Table(self.name, self.categorical_column.num_buckets, self.dimension, self.initializer, self.trainable)


@dataclasses.dataclass(frozen=True)
class SharedEmbeddingColumn(_OfTable):
    """See `shared_embeddings`."""

    shared_table: Table
    combiner: str = "mean"
    max_norm: float | None = None

    @property
    def name(self) -> str:
        """See `FeatureColumn`."""
        return f"{self.categorical_column.name}_shared_embedding"

    @property
    def table(self) -> Table:
        """The table, which other columns look ids up in too."""
        return self.shared_table


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """Describes a row of weights for each id, and how those of one row become one.

    Args:
      categorical_column: a categorical column, also one of sequences, each of whose steps is embedded.
      dimension: how many weights an id has.
      combiner: "mean", "sqrtn" or "sum" of the rows of all ids; ids that a row does not have count nothing, and a row
        without any is zeros.
      initializer: a function of a random key, a shape and a dtype, as those of `flax.linen.initializers`; None for a
        normal distribution of standard deviation `1 / sqrt(dimension)`, cut at two of these.
      max_norm: the largest L2 norm of the weights of one id; larger ones are scaled down before they are combined.
      trainable: whether the weights are trained.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if a number is out of its range, or `combiner` is unknown.

    Example:
      >>> from trainer.estimator.feature_columns import categorical_column_with_hash_bucket
      >>> embedding_column(categorical_column_with_hash_bucket("city", 1000), dimension=8).name
      'city_embedding'

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/embedding_column.
    """
    column = as_categorical("categorical_column", categorical_column)
    _check_embedding(dimension, combiner, initializer, max_norm, trainable)
    return EmbeddingColumn(column, int(dimension), combiner, initializer, max_norm, trainable)


def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    shared_embedding_collection_name: str | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[SharedEmbeddingColumn]:
    """Describes embeddings of several columns in one table: a module that has some of these columns has it once.

    Args:
      categorical_columns: columns of one kind, with equally many ids.
      dimension: as for `embedding_column`, like `combiner` and `initializer`.
      combiner: see `embedding_column`.
      initializer: see `embedding_column`.
      shared_embedding_collection_name: the name of the table; None for one made of the columns' names.
      max_norm: see `embedding_column`.
      trainable: see `embedding_column`.

    Returns:
      A dense column for each categorical column, in their order.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if there are no columns, or they are of different kinds or sizes; or as `embedding_column` does.

    Example:
      >>> from trainer.estimator.feature_columns import categorical_column_with_identity
      >>> watched, shown = (categorical_column_with_identity(key, 100) for key in ("watched", "shown"))
      >>> [column.table.name for column in shared_embeddings([watched, shown], dimension=8)]
      ['shown_watched_shared_embedding', 'shown_watched_shared_embedding']

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/shared_embeddings.
    """
    if isinstance(categorical_columns, CategoricalColumn) or not hasattr(categorical_columns, "__iter__"):
        raise wrong_type("categorical_columns", categorical_columns, "a list of categorical columns")
    columns = [as_categorical("categorical_columns", column) for column in categorical_columns]
    if not columns:
        raise ValueError("`categorical_columns` must have at least one column. Received: none.")
    _check_embedding(dimension, combiner, initializer, max_norm, trainable)
    first, *others = sorted(columns, key=lambda column: column.name)
    for column in others:
        kinds = [type(_unwrapped(one)).__name__ for one in (first, column)]
        if kinds[0] != kinds[1] or first.num_buckets != column.num_buckets:
            raise ValueError(
                "Columns that share an embedding must be of one kind, with equally many ids. Received: "
                f"{first.name!r}, a {kinds[0]} with {first.num_buckets}, and {column.name!r}, a {kinds[1]} with "
                f"{column.num_buckets}.")
    name = shared_embedding_collection_name or "_".join(
        sorted(column.name for column in columns)) + "_shared_embedding"
    arguments.require_text(shared_embedding_collection_name=name)
    table = Table(name, first.num_buckets, int(dimension), initializer, trainable)
    return [SharedEmbeddingColumn(column, table, combiner, max_norm) for column in columns]


def _unwrapped(column: CategoricalColumn) -> CategoricalColumn:
    """Returns the column below weights and sequences."""
    while (inner := getattr(column, "categorical_column", None)) is not None:
        column = inner
    return column


def _check_embedding(dimension: Any, combiner: Any, initializer: Any, max_norm: Any, trainable: Any) -> None:
    arguments.check_count("dimension", dimension)
    arguments.check_word("combiner", combiner, COMBINERS)
    arguments.require_functions(initializer=initializer)
    arguments.require_bool(trainable=trainable)
    if max_norm is not None:
        arguments.require_positive(max_norm=max_norm)
