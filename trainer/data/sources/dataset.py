"""Datasets over arrays, with the words and the order of `tf.data`.

Owns the public `Dataset`. It touches only row numbers until a batch is read; then each array is gathered once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.core.arguments import as_count
from trainer.core.errors import near_hint
from trainer.core.types import ArrayTree
from trainer.data.sources.arrays import column_array
from trainer.data.sources.batches import Batch, as_batch, pack_x_y_sample_weight
from trainer.data.sources.buffers import POOL
from trainer.data.sources.host_arrays import HostArrays
from trainer.data.sources.order import Count, Order, is_finite

# How many rows an unbatched dataset gathers at a time.
_CHUNK_ROWS = 1024


class Batching(NamedTuple):
    """How rows make batches: `size` rows in each but the last, and the order of the batches."""

    size: int
    order: Order


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """An immutable description of batches to be read from arrays in memory.

    Each method returns a new dataset and costs nothing; reading a batch gathers its rows, so that a dataset is as fast
    as the arrays themselves. The words mean what they mean in `tf.data`: before `batch` the elements are rows, after it
    they are batches, and `shuffle`, `map`, `repeat` and `take` act on whatever the elements are. Iterating yields pass
    0; `fit` reads another pass in each epoch.

    Batches are owned copies, in the dtypes that JAX would give them (64 bits become 32 unless `jax_enable_x64` is set).
    Do not write to the arrays once the dataset is in use: `fit` may hold a copy of them on the devices as long as the
    dataset, or a dataset that was made from it, or the arrays exist.

    Example:
      >>> dataset = Dataset.from_arrays((np.arange(5.0), np.arange(5))).batch(2)
      >>> dataset
      Dataset(3 batches of 2 rows)
      >>> [y.tolist() for x, y in dataset]
      [[0, 1], [2, 3], [4]]

    Source: the interface follows https://www.tensorflow.org/api_docs/python/tf/data/Dataset.
    """

    _arrays: HostArrays
    _row_order: Order
    _row_maps: tuple[Callable[..., Any], ...] = ()
    _batching: Batching | None = None
    _batch_maps: tuple[Callable[..., Any], ...] = ()

    @classmethod
    def from_arrays(cls, data: ArrayTree) -> Dataset:
        """Returns a dataset whose elements are the rows of arrays.

        Args:
          data: an array, or a tree (tuple, dict, nested) of arrays with equal first dimensions. NumPy and JAX arrays,
            whatever `np.asarray` takes, and lists of numbers. A list of arrays is treated like a tuple. NumPy arrays
            are neither copied nor changed.

        Raises:
          ValueError: the first dimensions differ, there are no rows, or an array is a scalar or not numeric.
        """
        return cls.from_host_arrays(HostArrays.of(data))

    @classmethod
    def from_columns(cls, data: Any, x: Any, y: Any = None, sample_weight: Any = None) -> Dataset:
        """Returns a dataset whose elements are rows `(x, y)` or `(x, y, sample_weight)` of named columns.

        Args:
          data: a table, such as a dataset of Hugging Face's `datasets`, a data frame or a dict of arrays, that gives a
            column for its name; or a list of dicts, each a row. Columns hold numbers, arrays or images of one shape.
          x: the name of the column of inputs; or a list of names, for inputs by position, or a dict of names, for
            inputs by name: `{"size": "size", "age": "age"}` for a module that reads `x["size"]`.
          y: likewise of targets; None for none.
          sample_weight: likewise of weights of rows.

        Raises:
          ValueError: there is no such column, or a column does not make an array.

        Example:
          >>> rows = [{"size": 1.0, "age": 3.0, "label": 0}, {"size": 2.0, "age": 4.0, "label": 1}]
          >>> [y.tolist() for x, y in Dataset.from_columns(rows, x={"a": "size", "b": "age"}, y="label").batch(2)]
          [[0, 1]]
        """
        parts = [jax.tree.map(functools.partial(_column, data), names) for names in (x, y, sample_weight)]
        return cls.from_arrays(pack_x_y_sample_weight(*parts))

    @classmethod
    def from_host_arrays(cls, arrays: HostArrays) -> Dataset:
        """Returns a dataset whose elements are the rows of arrays that were converted and checked."""
        return cls(arrays, Order(arrays.rows))

    def shuffle(self, seed: int = 0) -> Dataset:
        """Returns this dataset with its elements in an order drawn uniformly, another order in each pass.

        The order is a function of the seed and the number of the pass alone; each repetition of `repeat` is a pass.
        There is no buffer: every permutation is as likely as any other.

        Raises:
          ValueError: the dataset is endless, or the seed is less than 0.
          TypeError: the seed is no whole number.
        """
        seed = as_count("seed", seed, 0)
        return self._reordered(lambda order: order.shuffle(seed))

    def map(self, fn: Callable[..., Any]) -> Dataset:
        """Returns this dataset with `fn` applied to each element.

        Args:
          fn: takes an element, a tuple as separate arguments, and returns a tree of arrays. Before `batch` it is called
            once for each row; after `batch` once for each batch, whose rows it must keep equal in number in all
            arrays. Calling it after `batch`, on whole batches, is much faster.
        """
        if self._batching is None:
            return dataclasses.replace(self, _row_maps=(*self._row_maps, fn))
        return dataclasses.replace(self, _batch_maps=(*self._batch_maps, fn))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Returns this dataset with `batch_size` consecutive rows as one element.

        Args:
          batch_size: rows of a batch.
          drop_remainder: leave out a last batch of fewer rows.

        Raises:
          ValueError: `batch_size` is less than 1, the dataset is batched already, or nothing would remain.
          TypeError: `batch_size` is no whole number.
        """
        if self._batching is not None:
            raise ValueError(f"The dataset is already batched, with batch_size={self._batching.size}.")
        batch_size = as_count("batch_size", batch_size)
        rows = self._row_order.length
        if not is_finite(rows):
            return dataclasses.replace(self, _batching=Batching(batch_size, Order(math.inf)))
        if drop_remainder:
            if rows < batch_size:
                raise ValueError("`drop_remainder=True` leaves the dataset empty: "
                                 f"it has {rows} rows, fewer than batch_size={batch_size}.")
            rows -= rows % batch_size
        batching = Batching(batch_size, Order(-(-rows // batch_size)))
        return dataclasses.replace(self, _row_order=self._row_order.take(rows), _batching=batching)

    def repeat(self, times: int | None = None) -> Dataset:
        """Returns this dataset with its elements repeated `times` times, endlessly when None.

        Raises:
          ValueError: `times` is less than 1.
          TypeError: `times` is neither None nor a whole number.
        """
        if times is not None:
            times = as_count("times", times)
        return self._reordered(lambda order: order.repeat(times))

    def take(self, count: int) -> Dataset:
        """Returns a dataset of the first `count` elements, or of all if there are fewer.

        Raises:
          ValueError: `count` is less than 1.
          TypeError: `count` is no whole number.
        """
        count = as_count("count", count)
        return self._reordered(lambda order: order.take(count))

    @property
    def cardinality(self) -> Count:
        """How many elements a pass has: rows before `batch`, batches after it; `math.inf` when endless."""
        return self._order.length

    @property
    def batch_size(self) -> int | None:
        """Rows of a full batch; None before `batch`."""
        return None if self._batching is None else self._batching.size

    @property
    def is_mapped(self) -> bool:
        """Whether `map` was called, so that batches are not simply rows of the arrays."""
        return bool(self._row_maps or self._batch_maps)

    @property
    def arrays(self) -> HostArrays:
        """The numpy arrays that rows are gathered from: the user's own, not to be written to."""
        return self._arrays

    @property
    def rows(self) -> int | None:
        """How many rows a pass has, or None if it is endless or its batches were reordered, repeated or taken from."""
        rows = self._row_order.length
        has_all_batches = self._batching is None or not self._batching.order.steps
        return rows if is_finite(rows) and has_all_batches else None

    def __len__(self) -> int:
        """Returns `cardinality`; a TypeError for an endless dataset, whose length no int can be."""
        if not is_finite(self.cardinality):
            raise TypeError("An endless dataset has no length. Use `cardinality`, or `take` some elements first.")
        return self.cardinality

    def __iter__(self) -> Iterator[Any]:
        return self.read()

    def __repr__(self) -> str:
        elements = "rows" if self._batching is None else f"batches of {self._batching.size} rows"
        return f"Dataset({self.cardinality} {elements})"

    def read(self, pass_index: int = 0, start: int = 0) -> Generator[Any, None, None]:
        """Yields the elements of one pass.

        Args:
          pass_index: which pass, from 0; shuffled datasets have another order in each.
          start: how many elements to leave out, without reading them.

        Yields:
          Trees of owned numpy arrays: rows, or batches once `batch` was called.
        """
        if self._batching is None:
            yield from self._read_rows(pass_index, start)
            return
        while start < self.cardinality:
            yield self._mapped(self.gather(self.index_block(pass_index, start, start + 1)[0]))
            start += 1

    def index_block(self, pass_index: int, start: int, stop: int) -> np.ndarray:
        """Returns the row numbers of batches from `start` on, as many as are of equal size, before `stop`.

        Args:
          pass_index: which pass.
          start: the number of the first batch.
          stop: the number after the last batch, greater than `start`.

        Returns:
          Integers of shape `(count, rows)` with `1 <= count <= stop - start`.

        Raises:
          ValueError: before `batch`.
        """
        batching = self.require_batched()
        numbers_of_batches = np.arange(start, min(stop, batching.order.length))
        parts: list[np.ndarray] = []
        for base_pass, batches in batching.order.locate(pass_index, numbers_of_batches):
            for part in self._split_at_remainder(batches, batching.size):
                index = self._rows_of(base_pass, part, batching.size)
                if parts and index.shape[1] != parts[0].shape[1]:
                    return np.concatenate(parts)
                parts.append(index)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def prepare(self, pass_index: int, batch: int) -> None:
        """Begins to find the order of the rows from a batch of a pass on, in a thread, if it takes long."""
        batching = self.require_batched()
        row_pass, first = batching.order.prepare(pass_index, batch)
        self._row_order.prepare(row_pass, first * batching.size)

    def gather(self, index: np.ndarray) -> Batch:
        """Returns the rows at `index` of every array, before any `map`: leaves of shape `(*index.shape, ...)`."""
        return self._arrays.gather(index, None, POOL)

    def require_batched(self) -> Batching:
        """Returns how rows make batches.

        Raises:
          ValueError: before `batch`.
        """
        if self._batching is None:
            raise ValueError("The Dataset has rows as elements, not batches. Call its `batch(batch_size)` first.")
        return self._batching

    @property
    def _order(self) -> Order:
        return self._row_order if self._batching is None else self._batching.order

    def _reordered(self, change: Callable[[Order], Order]) -> Dataset:
        if self._batching is None:
            return dataclasses.replace(self, _row_order=change(self._row_order))
        batching = self._batching._replace(order=change(self._batching.order))
        return dataclasses.replace(self, _batching=batching)

    def _split_at_remainder(self, batches: np.ndarray, batch_size: int) -> list[np.ndarray]:
        """Splits batch numbers so that the short last batch stands alone."""
        rows = self._row_order.length
        if not is_finite(rows) or rows % batch_size == 0:
            return [batches]
        found = np.flatnonzero(batches == rows // batch_size)
        if not found.size:
            return [batches]
        return [part for part in np.split(batches, [found[0], found[0] + 1]) if part.size]

    def _rows_of(self, pass_index: int, batches: np.ndarray, batch_size: int) -> np.ndarray:
        """Returns the row numbers, shape `(count, rows)`, of batches that are equally long."""
        first_rows = batches[:, None] * batch_size
        width = min(batch_size, self._row_order.length - int(first_rows[0, 0]))
        positions = first_rows + np.arange(width)
        runs = self._row_order.locate(pass_index, positions.reshape(-1))
        numbers = runs[0][1] if len(runs) == 1 else np.concatenate([rows for _, rows in runs])
        return numbers.reshape(positions.shape)

    def _read_rows(self, pass_index: int, start: int) -> Iterator[Any]:
        while start < self.cardinality:
            positions = np.arange(start, min(start + _CHUNK_ROWS, self.cardinality))
            for _, index in self._row_order.locate(pass_index, positions):
                for row in _rows(self.gather(index)):
                    yield self._map_row(row)
            start += len(positions)

    def _map_row(self, row: Any) -> Any:
        for fn in self._row_maps:
            row = _call(fn, row)
        return row

    def _mapped(self, batch: Batch) -> Batch:
        if not self.is_mapped:
            return batch
        if self._row_maps:
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(self._map_row(row) for row in _rows(batch)))
        for fn in self._batch_maps:
            batch = _call(fn, batch)
        return as_batch(batch)


def _column(data: Any, name: str) -> np.ndarray:
    where, place = data, "The data have"
    try:
        if isinstance(data, list):
            column = []
            for number, where in enumerate(data):
                place = f"Row {number} of the data has"
                column.append(where[name])
        else:
            column = data[name]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{place} no column {name!r}. {near_hint(str(name), _names(where))}") from error
    return column_array(column)


def _names(table: Any) -> list[str]:
    return [str(name) for name in getattr(table, "column_names", None) or table]


def _call(fn: Callable[..., Any], element: Any) -> Any:
    return fn(*element) if isinstance(element, tuple) else fn(element)


def _rows(batch: Batch) -> Iterator[Any]:
    leaves, structure = jax.tree.flatten(batch)
    for parts in zip(*leaves, strict=True):
        yield jax.tree.unflatten(structure, parts)
