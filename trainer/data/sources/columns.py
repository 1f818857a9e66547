"""Batches of named columns as batches of inputs and targets.

Owns the public `batches_from_columns`. It must not know of the library that yields the columns.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe, near_hint
from trainer.core.types import Count
from trainer.data.sources.arrays import Batch, DataError, column_array, pack_x_y_sample_weight
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


@explains_arguments
def batches_from_columns(batches: Iterable[Any], x: Any, y: Any = None, sample_weight: Any = None) -> ColumnBatches:
    """Returns batches `x`, `(x, y)` or `(x, y, sample_weight)` of an iterable of dicts of columns.

    For streams of named columns, such as Hugging Face's `datasets` after `batch`, or a `DataLoader` of dicts. The
    stream's position is saved and restored as if the stream itself were passed. Tables that fit into memory are read by
    `Dataset.from_columns`.

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
      TypeError: if `batches` is a table, or not iterable.
      ValueError: if `x` names no column; while reading, if a batch is not a dict, there is no such column, or a column
        has a single number instead of rows, or rows of several shapes.

    Example:
      >>> stream = [{"size": [1.0, 2.0], "label": [0, 1], "name": ["a", "b"]}]
      >>> [(x.tolist(), y.tolist()) for x, y in batches_from_columns(stream, x="size", y="label")]
      [([1.0, 2.0], [0, 1])]
    """
    if hasattr(batches, "keys") or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError("`batches` must be an iterable whose items are dicts of columns. Received: a value of type "
                        f"{type(batches).__name__}. `trainer.data.Dataset.from_columns` reads a table in memory.")
    if not jax.tree.leaves(x):
        raise ValueError(f"`x` must be the name of a column, or a list or a dict of names. Received: x={x!r}.")
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
        column = columns[name]
    except (LookupError, TypeError, ValueError) as error:
        if not hasattr(columns, "keys"):
            raise DataError(f"A batch must be a dict of columns, of which {name!r} is needed. Received: "
                            f"{describe(columns)}.") from error
        raise DataError(f"A batch has no column {name!r}. {near_hint(str(name), map(str, columns))}") from error
    if isinstance(column, (numbers.Number, str, bytes)) or getattr(column, "ndim", None) == 0:
        raise DataError(f"The column {name!r} of a batch must have an item for each row. Received: {describe(column)}. "
                        "The items of `batches` seem to be rows: make batches of them first, as by `.batch(32)`.")
    try:
        return column_array(column)
    except (DataError, TypeError) as error:
        raise DataError(f"The column {name!r} of a batch cannot become an array with rows first. {error}") from error
