"""Batches of named columns as batches of inputs and targets.

Owns the public `batches_from_columns`. It must not know of the library that yields the columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from trainer.core.errors import near_hint
from trainer.data.sources.arrays import DataError, column_array
from trainer.data.sources.batches import Batch, pack_x_y_sample_weight
from trainer.data.sources.order import Count
from trainer.data.sources.sources import IterableSource


@dataclasses.dataclass(frozen=True)
class ColumnBatches:
    """The result of `batches_from_columns`.

    Attributes:
      batches: yields dicts of columns.
      names: the names of the columns, as a batch.
    """

    batches: Iterable[Any]
    names: Any

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch_of, self.batches)

    def batch_of(self, columns: Any) -> Batch:
        """Returns a dict of columns as a batch."""
        return jax.tree.map(functools.partial(_column, columns), self.names)


def batches_from_columns(batches: Iterable[Any], x: Any, y: Any = None, sample_weight: Any = None) -> ColumnBatches:
    """Returns batches `x`, `(x, y)` or `(x, y, sample_weight)` of an iterable of dicts of columns.

    For streams of named columns, such as those of Hugging Face's `datasets` after `batch`, or a `DataLoader` whose
    batches are dicts. The stream's position is saved and restored as if it were passed itself. Tables that fit into
    memory are read by `Dataset.from_columns`.

    Args:
      batches: yields batches as dicts from column name to an array, or to a list with a number or an array of the same
        shape for each row.
      x: the name of the column of inputs; or a list of names, for positional inputs, or a dict of names, for named
        inputs.
      y: the same for targets; None for no targets.
      sample_weight: the same for weights of rows.

    Returns:
      An iterable of batches, for `fit`, `evaluate` and `predict`.

    Raises:
      ValueError: while reading, if there is no such column, or the rows of a column have several shapes.

    Example:
      >>> stream = [{"size": [1.0, 2.0], "label": [0, 1], "name": ["a", "b"]}]
      >>> [(x.tolist(), y.tolist()) for x, y in batches_from_columns(stream, x="size", y="label")]
      [([1.0, 2.0], [0, 1])]
    """
    return ColumnBatches(batches, pack_x_y_sample_weight(x, y, sample_weight))


class ColumnSource(IterableSource):
    """Batches of `ColumnBatches`.

    Args:
      data: the batches.
      num_batches: as in `IterableSource`.
    """

    def __init__(self, data: ColumnBatches, num_batches: Count | None):
        super().__init__(data.batches, num_batches)
        self._batch_of = data.batch_of

    def _batches(self, elements: Iterator[Any]) -> Iterator[Batch]:
        return map(self._batch_of, elements)


def _column(columns: Any, name: str) -> Any:
    try:
        return column_array(columns[name])
    except (LookupError, TypeError) as error:
        known = list(map(str, columns)) if hasattr(columns, "keys") else []
        raise DataError(f"A batch has no column {name!r}. {near_hint(str(name), known)}") from error
