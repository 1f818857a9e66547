"""Embedding columns, with separate or shared tables."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import jax

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
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
    """Base class of columns that look up ids in a table."""

    combiner: str
    max_norm: float | None

    @property
    @abc.abstractmethod
    def table(self) -> Table:
        """The table for lookups."""

    @property
    def width(self) -> int:
        return self.table.width

    @property
    def tables(self) -> tuple[Table, ...]:
        return (self.table,)

    def dense(self, features: Features, tables: Tables) -> jax.Array:
        which = self.categorical_column.ids_and_weights(features)
        return combine_rows(tables[self.table], which, self.combiner, self.max_norm)


@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(_OfTable):
    """Column of `embedding_column`."""

    dimension: int
    combiner: str = "mean"
    initializer: Initializer | None = None
    max_norm: float | None = None
    trainable: bool = True

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_embedding"

    @property
    def table(self) -> Table:
        """The table for lookups."""
        return Table(self.name, self.categorical_column.num_buckets, self.dimension, self.initializer, self.trainable)


@dataclasses.dataclass(frozen=True)
class SharedEmbeddingColumn(_OfTable):
    """Column of `shared_embeddings`."""

    shared_table: Table
    combiner: str = "mean"
    max_norm: float | None = None

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_shared_embedding"

    @property
    def table(self) -> Table:
        """The table for lookups, shared with other columns."""
        return self.shared_table


@explains_arguments
def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """Returns a dense column that embeds ids and combines the embeddings of each row.

    Args:
      categorical_column: a categorical column. Columns of sequences are embedded per time step.
      dimension: number of weights per id.
      combiner: "mean", "sqrtn" or "sum" over the ids of a row. Missing ids are ignored, and a row without ids gives
        zeros.
      initializer: function of a random key, a shape and a dtype, as in `flax.linen.initializers`; None for a normal
        distribution with standard deviation `1 / sqrt(dimension)`, truncated at two standard deviations.
      max_norm: maximum L2 norm of an embedding; larger embeddings are scaled down before they are combined.
      trainable: whether the weights are trained.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if a number is out of range, or `combiner` is unknown.

    Example:
      >>> from trainer.estimator.feature_columns import categorical_column_with_hash_bucket
      >>> embedding_column(categorical_column_with_hash_bucket("city", 1000), dimension=8).name
      'city_embedding'

    Source: https://www.tensorflow.org/api_docs/python/tf/feature_column/embedding_column.
    """
    column = as_categorical("categorical_column", categorical_column)
    _check_embedding(dimension, combiner, initializer, max_norm, trainable)
    return EmbeddingColumn(column, int(dimension), combiner, initializer, max_norm, trainable)


@explains_arguments
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
    """Returns embedding columns that share a table.

    Args:
      categorical_columns: columns of the same kind, with the same number of ids.
      dimension, combiner, initializer, max_norm, trainable: as in `embedding_column`.
      shared_embedding_collection_name: name of the table; by default made of the columns' names.

    Returns:
      A list of dense columns, in the order of `categorical_columns`. A module with several of these columns creates the
      table once.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if there are no columns, the columns differ in kind or size, a number is out of range, or `combiner`
        is unknown.

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
    """Returns the innermost column, without weights and sequences."""
    while (inner := getattr(column, "categorical_column", None)) is not None:
        column = inner
    return column


def _check_embedding(dimension: object, combiner: object, initializer: object, max_norm: object,
                     trainable: object) -> None:
    arguments.check_count("dimension", dimension)
    arguments.check_word("combiner", combiner, COMBINERS)
    arguments.require_functions(initializer=initializer)
    arguments.require_bool(trainable=trainable)
    if max_norm is not None:
        arguments.require_positive(max_norm=max_norm)
