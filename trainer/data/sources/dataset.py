"""Datasets over arrays, with the methods and the order of `tf.data`.

Owns the public `Dataset`, and `DatasetSource`, from which `fit` reads it. Shuffling, repeating and taking are
arithmetic on indices (`Order`), so that any position of any pass is found without reading earlier elements. It handles
indices only until a batch is read; then each array is gathered once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from trainer.core.arguments import as_count
from trainer.core.calls.entry_points import foreign_arguments
from trainer.core.errors import near_hint
from trainer.core.foreign_names import ForeignNames, ForeignNamesOfClass
from trainer.core.types import ArrayTree, Count
from trainer.data.sources import foreign_names
from trainer.data.sources.arrays import Batch, HostArrays, as_batch, column_array, pack_x_y_sample_weight
from trainer.data.sources.maps import ElementMap, apply_maps

_CHUNK_ROWS = 1024  # number of rows that an unbatched dataset gathers at a time
_MANY = 2**20  # number of rows whose permutation is worth a thread

Span = tuple[int, np.ndarray]
"""A pass number, and positions within that pass."""


class Batching(NamedTuple):
    """Batches of rows: `size` rows per batch, except for the last, and the order of the batches."""

    size: int
    order: Order


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset(ForeignNames, metaclass=ForeignNamesOfClass):
    """An immutable description of batches from arrays in memory.

    Each method returns a new dataset at no cost. Reading a batch gathers its rows, so a dataset is as fast as the
    arrays themselves. Methods work as in `tf.data`: before `batch` the elements are rows, after it they are batches,
    and `shuffle`, `map`, `repeat` and `take` act on the elements. Iteration yields pass 0; `fit` reads another pass in
    each epoch.

    Batches are owned copies, in JAX's dtypes (32 bits instead of 64 unless `jax_enable_x64` is set). `fit` may keep a
    copy of the arrays on the devices as long as the dataset, a dataset derived from it, or the arrays exist, and renews
    it if the arrays were written to before the call, or by a callback before an epoch.

    Attributes:
      arrays: the numpy arrays that rows are gathered from: the user's own.

    Example:
      >>> dataset = Dataset.from_arrays((np.arange(5.0), np.arange(5))).batch(2)
      >>> dataset
      Dataset(3 batches of 2 rows)
      >>> [y.tolist() for x, y in dataset]
      [[0, 1], [2, 3], [4]]

    Source: the interface follows https://www.tensorflow.org/api_docs/python/tf/data/Dataset.
    """

    arrays: HostArrays
    _row_order: Order
    _row_maps: tuple[ElementMap, ...] = ()
    _batching: Batching | None = None
    _batch_maps: tuple[ElementMap, ...] = ()

    _foreign_names = foreign_names.METHODS

    @classmethod
    @foreign_arguments(foreign_names.FROM_ARRAYS)
    def from_arrays(cls, data: ArrayTree) -> Dataset:
        """Returns a dataset whose elements are the rows of arrays.

        Args:
          data: an array, or a tree (tuple, dict, nested) of arrays with equal first dimensions: NumPy and JAX arrays,
            arguments of `np.asarray`, and lists of numbers. A list of arrays is treated as a tuple. NumPy arrays are
            neither copied nor changed. Arrays of text stay on the host: `map` must make numbers of them before a step.

        Raises:
          ValueError: if the first dimensions differ, there are no rows, or an array is a scalar, or neither numeric nor
            text.
        """
        return cls.from_host_arrays(HostArrays.of(data, text=True))

    @classmethod
    def from_tensors(cls, data: ArrayTree) -> Dataset:
        """Returns a dataset with a single element, a batch of all rows. Takes the same data as `from_arrays`.

        >>> len(Dataset.from_tensors((np.arange(5.0), np.arange(5))).repeat(3))
        3
        """
        dataset = cls.from_arrays(data)
        return dataset.batch(dataset.arrays.rows)

    @classmethod
    def from_columns(cls, data: Any, x: Any, y: Any = None, sample_weight: Any = None) -> Dataset:
        """Returns a dataset whose elements are rows `(x, y)` or `(x, y, sample_weight)` of named columns.

        Args:
          data: a table that returns a column by name, such as a dataset of Hugging Face's `datasets`, a data frame or a
            dict of arrays; or a list of dicts, one dict per row. Columns hold numbers, text, arrays or images of the
            same shape.
          x: the name of the column of inputs; or a list of names, for positional inputs, or a dict of names, for named
            inputs: `{"size": "size", "age": "age"}` for a module that reads `x["size"]`.
          y: the same for targets; None for no targets.
          sample_weight: the same for weights of rows.

        Raises:
          ValueError: if there is no such column, or a column cannot be converted to an array.

        Example:
          >>> rows = [{"size": 1.0, "age": 3.0, "label": 0}, {"size": 2.0, "age": 4.0, "label": 1}]
          >>> [y.tolist() for x, y in Dataset.from_columns(rows, x={"a": "size", "b": "age"}, y="label").batch(2)]
          [[0, 1]]
        """
        names = pack_x_y_sample_weight(x, y, sample_weight)
        arrays = jax.tree.map(functools.partial(_column, data), names)
        return cls.from_host_arrays(HostArrays.of(arrays, text=True, columns=jax.tree.leaves(names)))

    @classmethod
    def from_host_arrays(cls, arrays: HostArrays) -> Dataset:
        """Returns a dataset whose elements are the rows of converted and checked arrays."""
        return cls(arrays, Order(arrays.rows))

    @foreign_arguments(foreign_names.SHUFFLE)
    def shuffle(self, seed: int = 0) -> Dataset:
        """Returns this dataset with its elements in a uniformly random order, a new order in each pass.

        The order depends on the seed and the index of the pass only; each repetition of `repeat` is a pass. There is no
        buffer: all permutations are equally likely.

        Raises:
          ValueError: if the dataset is endless, or the seed is less than 0.
          TypeError: if the seed is not an integer.
        """
        seed = as_count("seed", seed, 0)
        return self._reordered(lambda order: order.shuffle(seed))

    @foreign_arguments(foreign_names.MAP)
    def map(self, fn: Callable[..., Any]) -> Dataset:
        """Returns this dataset with `fn` applied to each element.

        Args:
          fn: takes an element, a tuple as separate arguments, and returns a tree of arrays. Before `batch` it is called
            once per row. After `batch` it is called once per batch, which is much faster; all returned arrays must have
            the same number of rows.
        """
        return self._with_map((fn, None))

    @foreign_arguments(foreign_names.RANDOM_MAP)
    def random_map(self, fn: Callable[..., Any], seed: int = 0) -> Dataset:
        """Returns this dataset with `fn` applied to each element, with a random generator as its first argument.

        The random numbers depend on nothing else than described here, so a resumed run and any number of devices see
        the same elements.

        Args:
          fn: takes a `numpy.random.Generator` and an element, a tuple as separate arguments, such as a change of
            `trainer.data.augmentation`. The generator of a row depends on the seed, the pass and the row index, and the
            generator of a batch on the seed, the pass and the index of the batch before it was shuffled; each
            repetition of `repeat` is a pass.
          seed: distinguishes the random numbers of several maps.

        Raises:
          ValueError: if the seed is less than 0.
          TypeError: if the seed is not an integer.

        Example:
          >>> noisy = Dataset.from_arrays(np.zeros((2, 1))).random_map(lambda rng, x: x + rng.normal(size=1))
          >>> [x.shape for x in noisy.batch(2)]
          [(2, 1)]
        """
        return self._with_map((fn, as_count("seed", seed, 0)))

    @foreign_arguments(foreign_names.BATCH)
    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Returns this dataset with `batch_size` consecutive rows as each element.

        Args:
          batch_size: rows per batch.
          drop_remainder: whether to drop a last batch of fewer rows.

        Raises:
          ValueError: if `batch_size` is less than 1, the dataset is already batched, or the result would be empty.
          TypeError: if `batch_size` is not an integer.
        """
        if self._batching is not None:
            raise ValueError(f"The dataset is already batched, with batch_size={self._batching.size}.")
        batch_size = as_count("batch_size", batch_size)
        order = self._row_order
        if drop_remainder and order.length != math.inf:
            if order.length < batch_size:
                raise ValueError("`drop_remainder=True` leaves the dataset empty: "
                                 f"it has {order.length} rows, fewer than batch_size={batch_size}.")
            order = order.take(int(order.length) // batch_size * batch_size)
        batches = Order(math.inf if order.length == math.inf else -(-order.length // batch_size))
        return dataclasses.replace(self, _row_order=order, _batching=Batching(batch_size, batches))

    def repeat(self, times: int | None = None) -> Dataset:
        """Returns this dataset with its elements repeated `times` times; None repeats them endlessly.

        Raises:
          ValueError: if `times` is less than 1.
          TypeError: if `times` is neither None nor an integer.
        """
        if times is not None:
            times = as_count("times", times)
        return self._reordered(lambda order: order.repeat(times))

    def take(self, count: int) -> Dataset:
        """Returns a dataset of the first `count` elements, or of all elements if there are fewer.

        Raises:
          ValueError: if `count` is less than 1.
          TypeError: if `count` is not an integer.
        """
        count = as_count("count", count)
        return self._reordered(lambda order: order.take(count))

    @property
    def cardinality(self) -> Count:
        """Number of elements per pass: rows before `batch`, batches after it; `math.inf` if endless."""
        return (self._row_order if self._batching is None else self._batching.order).length

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a full batch; None before `batch`."""
        return None if self._batching is None else self._batching.size

    @property
    def is_mapped(self) -> bool:
        """Whether `map` or `random_map` was called, so that batches are more than rows of the arrays."""
        return bool(self._row_maps or self._batch_maps)

    @property
    def rows(self) -> int | None:
        """Number of rows per pass; None if the dataset is endless, or batches were reordered, repeated or taken."""
        rows, batching = self._row_order.length, self._batching
        if rows == math.inf or (batching is not None and batching.order != Order(-(-rows // batching.size))):
            return None
        return int(rows)

    def __len__(self) -> int:
        """Returns `cardinality`; raises TypeError for an endless dataset."""
        if self.cardinality == math.inf:
            raise TypeError("An endless dataset has no length. Use `cardinality`, or `take` some elements first.")
        return int(self.cardinality)

    def __iter__(self) -> Iterator[Any]:
        return self.read()

    def __repr__(self) -> str:
        elements = "rows" if self._batching is None else f"batches of {self._batching.size} rows"
        return f"Dataset({self.cardinality} {elements})"

    def read(self, pass_index: int = 0, start: int = 0) -> Generator[Any, None, None]:
        """Yields the elements of a pass.

        Args:
          pass_index: index of the pass, from 0; shuffled datasets have a new order in each.
          start: number of elements to skip without reading.

        Yields:
          Trees of owned numpy arrays: rows, or batches once `batch` was called.
        """
        if self._batching is None:
            yield from self._read_rows(pass_index, start)
            return
        while start < self.cardinality:
            yield self._made(pass_index, start)
            start += 1

    def index_block(self, pass_index: int, start: int, stop: int) -> np.ndarray:
        """Returns the row indices of consecutive batches of equal size, from `start` to at most `stop`.

        Args:
          pass_index: index of the pass.
          start: the index of the first batch.
          stop: the index after the last batch, greater than `start`.

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
                runs = self._runs_of(base_pass, part, batching.size)
                rows = runs[0][1] if len(runs) == 1 else np.concatenate([numbers for _, numbers in runs])
                index = rows.reshape(len(part), -1)
                if parts and index.shape[1] != parts[0].shape[1]:
                    return np.concatenate(parts)
                parts.append(index)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def draw_ahead(self, pass_index: int, batch: int) -> None:
        """Starts a slow computation of the row order from a batch of a pass on, in a thread."""
        batching = self.require_batched()
        row_pass, first = batching.order.draw_ahead(pass_index, batch)
        self._row_order.draw_ahead(row_pass, first * batching.size)

    def gather(self, index: np.ndarray) -> Batch:
        """Returns the rows at `index` of every array, before any `map`: leaves of shape `(*index.shape, ...)`."""
        return self.arrays.gather(index)

    def require_batched(self) -> Batching:
        """Returns the batching of rows.

        Raises:
          ValueError: before `batch`.
        """
        if self._batching is None:
            raise ValueError("The Dataset has rows as elements, not batches. Call its `batch(batch_size)` first.")
        return self._batching

    def _with_map(self, entry: ElementMap) -> Dataset:
        if self._batching is None:
            return dataclasses.replace(self, _row_maps=(*self._row_maps, entry))
        return dataclasses.replace(self, _batch_maps=(*self._batch_maps, entry))

    def _reordered(self, change: Callable[[Order], Order]) -> Dataset:
        if self._batching is None:
            return dataclasses.replace(self, _row_order=change(self._row_order))
        batching = self._batching._replace(order=change(self._batching.order))
        return dataclasses.replace(self, _batching=batching)

    def _split_at_remainder(self, batches: np.ndarray, batch_size: int) -> list[np.ndarray]:
        """Splits batch indices so that the short last batch is separate."""
        rows = self._row_order.length
        if rows == math.inf or rows % batch_size == 0:
            return [batches]
        found = np.flatnonzero(batches == rows // batch_size)
        if not found.size:
            return [batches]
        return [part for part in np.split(batches, [found[0], found[0] + 1]) if part.size]

    def _runs_of(self, pass_index: int, batches: np.ndarray, batch_size: int) -> list[Span]:
        """Returns the row indices of batches of equal length, by the pass of the rows."""
        first_rows = batches[:, None] * batch_size
        width = min(batch_size, self._row_order.length - int(first_rows[0, 0]))
        return self._row_order.locate(pass_index, (first_rows + np.arange(width)).reshape(-1))

    def _read_rows(self, pass_index: int, start: int) -> Iterator[Any]:
        while start < self.cardinality:
            positions = np.arange(start, min(start + _CHUNK_ROWS, self.cardinality))
            yield from self._mapped_rows(self._row_order.locate(pass_index, positions))
            start += len(positions)

    def _mapped_rows(self, runs: list[Span]) -> Iterator[Any]:
        for pass_index, index in runs:
            for number, row in zip(index.tolist(), _rows(self.gather(index)), strict=True):
                yield apply_maps(self._row_maps, row, (pass_index, number))

    def _made(self, pass_index: int, position: int) -> Batch:
        """Returns the batch at a position of a pass, mapped."""
        if not self.is_mapped:
            return self.gather(self.index_block(pass_index, position, position + 1)[0])
        batching = self.require_batched()
        [(base_pass, batches)] = batching.order.locate(pass_index, np.array([position]))
        runs = self._runs_of(base_pass, batches, batching.size)
        if self._row_maps:
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *self._mapped_rows(runs))
        else:
            batch = self.gather(np.concatenate([index for _, index in runs]))
        return as_batch(apply_maps(self._batch_maps, batch, (base_pass, int(batches[0]))), text=True)


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


def _rows(batch: Batch) -> Iterator[Any]:
    leaves, structure = jax.tree.flatten(batch)
    for parts in zip(*leaves, strict=True):
        yield jax.tree.unflatten(structure, parts)


class SeekingSource:
    """The part of a source whose `read` finds any position by the indices of the pass and the batch alone."""

    num_shapes = 1
    is_one_shot = False
    seeks = True
    pipeline: list[str] = []

    def end_epochs(self, count: int) -> None:
        """Does nothing: no pass depends on another."""

    def close(self) -> None:
        """Does nothing: there are no helpers."""

    def state(self) -> None:
        """Returns None: the indices of the pass and the batch are sufficient."""

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        raise ValueError("There is no such state: the data are of another kind now.")


class DatasetSource(SeekingSource):
    """Batches of a batched `Dataset`, from any position without reading earlier batches.

    Attributes:
      dataset: the dataset.
      arrays: the arrays whose rows form the batches; None if the dataset computes batches from them.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.arrays = None if dataset.is_mapped else dataset.arrays
        self.is_exact = self.arrays is not None
        self.num_batches = dataset.cardinality
        self.rows = dataset.rows

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        return self.dataset.read(pass_index, start)


def generator_of_pass(seed: int, pass_index: int) -> np.random.Generator:
    """Returns the generator that shuffles a pass: a resumed run draws the order again, without the passes before."""
    return np.random.default_rng([seed, pass_index])


class Reordering(Protocol):
    """A change of the order."""

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Span]:
        """Returns the origins of the elements at `positions`, before this step reorders them."""

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        """Starts slow computations for `locate` from a position on, and returns the origin of that position.

        An unknown position is 0.
        """


class Shuffle:
    """A new permutation in each pass, which depends on (seed, pass) only.

    A permutation of many rows takes seconds: 15 for 1e8. After `draw_ahead`, a thread draws it while the previous pass
    is read.
    """

    def __init__(self, length: int, seed: int):
        self._length = length
        self._seed = seed
        self._last: tuple[int, np.ndarray] | None = None
        self._ahead: dict[int, concurrent.futures.Future[np.ndarray]] = {}  # by pass: the current and the next

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Span]:
        last = self._last
        if last is None or last[0] != pass_index:
            ahead = self._ahead.pop(pass_index, None)
            last = self._last = pass_index, self._permutation(pass_index) if ahead is None else ahead.result()
        return [(pass_index, last[1][positions].astype(np.int64))]

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        is_there = pass_index in self._ahead or (self._last is not None and self._last[0] == pass_index)
        if self._length >= _MANY and not is_there:
            for other in list(self._ahead)[:-1]:
                del self._ahead[other]
            future = self._ahead[pass_index] = concurrent.futures.Future[np.ndarray]()
            threading.Thread(
                target=self._draw, args=(pass_index, future), name="trainer-shuffle", daemon=True).start()
        return pass_index, 0

    def _draw(self, pass_index: int, future: concurrent.futures.Future[np.ndarray]) -> None:
        try:
            future.set_result(self._permutation(pass_index))
        except Exception as error:
            future.set_exception(error)

    def _permutation(self, pass_index: int) -> np.ndarray:
        # The result of `generator_of_pass(...).permutation(length)`, in half the memory if int32 suffices.
        numbers = np.arange(self._length, dtype=np.int32 if self._length <= np.iinfo(np.int32).max else np.int64)
        generator_of_pass(self._seed, pass_index).shuffle(numbers)
        return numbers


class Repeat:
    """Repeated passes; `times` is None for endless repetition. Each repetition is another pass of the elements."""

    # Number of repetitions reserved for an endless pass, which separates them from the repetitions of the next pass.
    _ENDLESS = 2**32

    def __init__(self, length: int, times: int | None):
        self._repeated = length
        self._times = self._ENDLESS if times is None else times

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Span]:
        repetitions, positions = np.divmod(positions, self._repeated)
        cuts = np.flatnonzero(np.diff(repetitions)) + 1
        starts = (0, *cuts.tolist())
        return [
            (pass_index * self._times + int(repetitions[start]), part)
            for start, part in zip(starts, np.split(positions, cuts), strict=True)
        ]

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        repetition, position = divmod(position, self._repeated)
        return pass_index * self._times + repetition, position


@dataclasses.dataclass(frozen=True)
class Order:
    """Steps applied in turn to elements with indices from 0.

    Attributes:
      length: number of elements per pass; `math.inf` for an endless order.
      steps: the changes of the order, the first change first.
    """

    length: Count
    steps: tuple[Reordering, ...] = ()

    def shuffle(self, seed: int) -> Order:
        """Returns this order, shuffled."""
        if self.length == math.inf:
            raise ValueError("An endless dataset cannot be shuffled. Call `shuffle` before `repeat`.")
        return Order(self.length, (*self.steps, Shuffle(int(self.length), seed)))

    def repeat(self, times: int | None) -> Order:
        """Returns this order, repeated; an endless order is returned unchanged."""
        if self.length == math.inf:
            return self
        length = math.inf if times is None else self.length * times
        return Order(length, (*self.steps, Repeat(int(self.length), times)))

    def take(self, count: int) -> Order:
        """Returns the first `count` elements of this order, or all elements if it has fewer."""
        return Order(min(count, self.length), self.steps)

    def locate(self, pass_index: int, positions: np.ndarray) -> list[Span]:
        """Returns the indices of the elements at `positions` of a pass, as runs that share a pass, in order."""
        runs = [(pass_index, positions)]
        for step in reversed(self.steps):
            runs = [found for run in runs for found in step.locate(*run)]
        return runs

    def draw_ahead(self, pass_index: int, position: int) -> tuple[int, int]:
        """Starts slow computations for `locate` from a position of a pass on; see `Reordering.draw_ahead`."""
        for step in reversed(self.steps):
            pass_index, position = step.draw_ahead(pass_index, position)
        return pass_index, position
