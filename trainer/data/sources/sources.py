"""Sources: everything that yields batches, behind a small protocol.

Owns the reading of batches from an iterable, an indexed object and a one-shot iterator, and the weights of classes. It
must not group batches or know of epochs. The source of a `Dataset` is in `dataset.py`.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from trainer.core.errors import see
from trainer.core.types import Count
from trainer.data.sources.arrays import Batch, DataError, HostArrays, unpack_x_y_sample_weight
from trainer.data.sources.class_weight import ClassWeights
from trainer.data.sources.dataset import Dataset, DatasetSource, SeekingSource, generator_of_pass
from trainer.data.sources.groups import BatchConverter, map_batch
from trainer.data.sources.positions import positions_of

_ONE_SHOT: weakref.WeakSet[IterableSource] = weakref.WeakSet()  # that are being read
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Source(Protocol):
    """Yields batches, pass after pass."""

    @property
    def num_batches(self) -> Count | None:
        """Number of batches per pass; `math.inf` if endless, None if unknown."""

    @property
    def rows(self) -> int | None:
        """Number of rows per pass; None if unknown."""

    @property
    def num_shapes(self) -> int:
        """Number of shapes that the batches are known to have, but for a shorter last batch."""

    @property
    def is_one_shot(self) -> bool:
        """Whether there is a single pass, and another reader continues where the last reader stopped."""

    @property
    def is_exact(self) -> bool:
        """Whether another process can continue a pass at any position with the same batches."""

    @property
    def seeks(self) -> bool:
        """Whether `read` skips batches without reading them."""

    @property
    def pipeline(self) -> list[str]:
        """The data's own description of their pipeline, a line per step; empty without a description."""

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        """Returns a generator of a pass, without the first `start` batches.

        It yields the elements of the user's pipeline, which `as_batch` converts to batches; or, if several processes
        each read their own rows, `LocalRows`. Arrays may share memory with the pipeline: copy data that must outlive
        the next batch.
        """

    def state(self) -> dict[str, Any] | None:
        """Returns plain data from which `read_from` continues the last generator; None if that is impossible.

        Their "pass_index" is the index of the pass, which may be the next pass at the end of a pass.
        """

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        """Returns a generator of the rest of the pass in which `state` was taken."""

    def end_epochs(self, count: int) -> None:
        """Ends `count` epochs: an epoch that was read, or epochs that a resumed run skips."""

    def close(self) -> None:
        """Ends helpers such as reader processes; `read` starts them again."""


class SampleSource(DatasetSource):
    """A single batch, repeated, as a template of batches that other processes read for themselves."""

    def __init__(self, arrays: HostArrays):
        super().__init__(Dataset.from_host_arrays(arrays).batch(arrays.rows).repeat())
        self.is_exact = False  # the positions of the other processes are unknown


class IterableSource:
    """Batches of any iterable; an iterator is one-shot, any other iterable restarts in each pass.

    Iterators and iterables with states continue from a saved state; see `Positions`.

    Args:
      iterable: yields batches.
      num_batches: number of batches per pass; `math.inf` if endless, None if unknown.

    Raises:
      RuntimeError: if another thread reads the same iterator.
    """

    rows = None
    num_shapes = 1
    seeks = False

    def __init__(self, iterable: Any, num_batches: Count | None):
        self._iterable = self._described = iterable
        self.num_batches = num_batches
        self.is_one_shot = hasattr(iterable, "__next__")
        self._positions = positions_of(iterable)
        self._pass_index = 0
        self._is_over = False  # the last generator was read to the end of its pass
        self._thread = threading.current_thread()
        if self.is_one_shot:
            _ONE_SHOT.add(self)  # before the look at others: of two that begin together, one sees the other
            for other in list(_ONE_SHOT):
                if other._iterable is iterable and other._thread is not self._thread:
                    self.close()
                    raise RuntimeError(
                        f"The {type(iterable).__name__} of batches is read by two threads: a call in "
                        f"{other._thread.name!r} has not ended, and each would get some of the batches. Give each call "
                        f"an iterator of its own, or data that can be read again. {see('two-threads')}")

    @property
    def is_exact(self) -> bool:
        return self._positions.is_exact

    @property
    def pipeline(self) -> list[str]:
        # Grain's datasets have `parents`, and show their class, their number of workers and, often, their length.
        lines, steps = [], [self._described] if hasattr(self._described, "parents") else []
        while steps:
            step = steps.pop()
            length = f" of {len(step)}" if hasattr(step, "__len__") else ""
            lines.append(_ADDRESS.sub("", str(step)) + length)
            steps += getattr(step, "parents", ())
        return lines

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        return self._read(pass_index, start)

    def state(self) -> dict[str, Any] | None:
        if self._is_over and not self.is_one_shot:
            found = self._positions.next_pass()
            return None if found is None else {"pass_index": self._pass_index + 1, "iterator": found[0]}
        state = self._positions.state()
        return None if state is None else {"pass_index": self._pass_index, "iterator": state}

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        return self._read(state["pass_index"], 0, state["iterator"])

    def end_epochs(self, count: int) -> None:
        """Does nothing: independent passes have a state, and other passes are read."""

    def close(self) -> None:
        """Lets other threads read a one-shot iterator; each pass of other data closes its own iterator."""
        _ONE_SHOT.discard(self)

    def _batches(self, elements: Iterator[Any]) -> Iterator[Any]:
        return elements

    def _read(self, pass_index: int, start: int, state: Any = None) -> Generator[Any, None, None]:
        iterator = self._positions.begin(state)
        self._pass_index, self._is_over = pass_index, False
        try:
            yield from self._batches(itertools.islice(iterator, start, None))
            self._is_over = True
        finally:
            # The user's own iterator stays open; an iterator of this pass is closed.
            if not self.is_one_shot and hasattr(iterator, "close"):
                iterator.close()


class IndexedSource(SeekingSource):
    """Batches of an object with `__getitem__`, such as a `keras.utils.PyDataset`.

    Args:
      items: `items[i]` returns batch i; its `on_epoch_begin()` and `on_epoch_end()`, if any, are called before the
        first batch of each epoch and after the last batch.
      num_batches: number of batches per pass, or `math.inf`.
      shuffle: whether to draw the batches in a new order in each pass; an endless pass stays in order.
      seed: seed of the order.
    """

    rows = None
    is_exact = False  # the object may draw its own random numbers

    def __init__(self, items: Any, num_batches: Count, shuffle: bool, seed: int):
        self._items = items
        self.num_batches = num_batches
        self._shuffle = shuffle
        self._seed = seed
        self._is_in_epoch = False

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        batches = self._made(self._indices(pass_index, start))
        try:
            for batch in batches:
                yield batch
                self._begin_epoch()  # a pass may have several epochs
        finally:
            batches.close()

    def end_epochs(self, count: int) -> None:
        for _ in range(count):
            self._begin_epoch()
            self._is_in_epoch = False
            if hasattr(self._items, "on_epoch_end"):
                self._items.on_epoch_end()

    def _made(self, indices: Iterator[int]) -> Generator[Any, None, None]:
        for index in indices:
            self._begin_epoch()
            try:
                batch = self._items[index]
            except Exception as error:
                self._note(error, index)
                raise
            yield batch
            del batch

    def _note(self, error: Exception, index: int) -> None:
        """Adds the failed index to an error: with shuffling, it differs from the index of the batch."""
        error.add_note(f"It was raised for index {index} of a {type(self._items).__name__}.")

    def _begin_epoch(self) -> None:
        if not self._is_in_epoch:
            self._is_in_epoch = True
            if hasattr(self._items, "on_epoch_begin"):
                self._items.on_epoch_begin()

    def _indices(self, pass_index: int, start: int) -> Iterator[int]:
        if self.num_batches == math.inf:
            return itertools.count(start)
        count = int(self.num_batches)
        if self._shuffle:
            return iter(generator_of_pass(self._seed, pass_index).permutation(count)[start:].tolist())
        return iter(range(start, count))


class WeightedSource:
    """Batches `(x, y)` of another source with the weight of each row's class added, computed batch by batch."""

    def __init__(self, source: Source, class_weights: ClassWeights):
        self._source = source
        self._class_weights = class_weights
        self.num_batches = source.num_batches
        self.rows = source.rows
        self.num_shapes = source.num_shapes
        self.is_one_shot = source.is_one_shot
        self.seeks = source.seeks
        self.pipeline = source.pipeline

    @property
    def is_exact(self) -> bool:
        return self._source.is_exact

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        return self._weighted(self._source.read(pass_index, start), is_whole=start == 0)

    def state(self) -> dict[str, Any] | None:
        return self._source.state()

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        return self._weighted(self._source.read_from(state))

    def end_epochs(self, count: int) -> None:
        self._source.end_epochs(count)

    def close(self) -> None:
        self._source.close()

    def _weighted(
        self, batches: Generator[Any, None, None], is_whole: bool = False
    ) -> Generator[Any, None, None]:
        convert = BatchConverter()
        try:
            for element in batches:
                yield map_batch(self._with_weights, convert(element))
            if is_whole:
                self._class_weights.warn_of_unseen()
        finally:
            batches.close()

    def _with_weights(self, batch: Batch) -> Batch:
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise DataError("`class_weight` cannot be used with batches that have a `sample_weight`.")
        return x, y, self._class_weights(y)
