"""Sources: all that yields batches, behind one small protocol.

Owns how batches are drawn from a `Dataset`, an iterable, an indexed object and a one-shot iterator. It must not group
batches or know of epochs.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import numpy as np

from trainer.data.sources.arrays import DataError
from trainer.data.sources.batches import Batch, BatchConverter, map_batch, unpack_x_y_sample_weight
from trainer.data.sources.class_weight import ClassWeights
from trainer.data.sources.dataset import Dataset
from trainer.data.sources.host_arrays import HostArrays
from trainer.data.sources.order import Count, is_finite

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Source(Protocol):
    """Yields batches, pass after pass."""

    @property
    def num_batches(self) -> Count | None:
        """Batches in a pass; `math.inf` when endless, None when unknown."""

    @property
    def rows(self) -> int | None:
        """Rows in a pass, or None when unknown."""

    @property
    def is_one_shot(self) -> bool:
        """Whether there is a single pass, and a further reader continues where the last reader stopped."""

    @property
    def is_exact(self) -> bool:
        """Whether a pass can be continued anywhere, by the same batches, in another process."""

    @property
    def seeks(self) -> bool:
        """Whether `read` leaves out batches without reading them."""

    @property
    def pipeline(self) -> list[str]:
        """What the data say that they are made by, one line for each step; empty if they say nothing."""

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        """Returns a generator of one pass, leaving out the first `start` batches.

        It yields whatever the user's pipeline does, of which `as_batch` makes a batch; or, where several processes read
        its own rows of each batch, as a `Part`. Arrays may share memory with the pipeline: copy what must
        outlive the next batch.
        """

    def state(self) -> dict[str, Any] | None:
        """Returns plain data that tell `read_from` where the generator returned last stands; None if nothing can."""

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        """Returns a generator of the rest of the pass in which `state` was taken."""

    def end_epochs(self, count: int) -> None:
        """Does what belongs to the end of an epoch: of one just read, or of those that a resumed run need not read."""

    def close(self) -> None:
        """Ends what reads for it, such as processes, when no more is to be read; `read` starts it again."""


class DatasetSource:
    """Batches of a `Dataset`, from any position without reading what comes before it.

    Attributes:
      dataset: the batched dataset.
    """

    is_one_shot = False
    seeks = True
    pipeline: list[str] = []

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.is_exact = not dataset.is_mapped
        self.num_batches = dataset.cardinality
        self.rows = dataset.rows

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        return self.dataset.read(pass_index, start)

    def end_epochs(self, count: int) -> None:
        """Does nothing: no pass depends on another."""

    def close(self) -> None:
        """Does nothing: nothing reads for it."""

    def state(self) -> None:
        """Returns None: the number of the pass and of the batch tell all."""

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        raise ValueError("There is no such state: the data are of another kind now.")


class SampleSource(DatasetSource):
    """One batch again and again, in the place of batches that other processes read for themselves.

    Args:
      arrays: the batch.
    """

    def __init__(self, arrays: HostArrays):
        super().__init__(Dataset.from_host_arrays(arrays).batch(arrays.rows).repeat())
        self.is_exact = False  # where the others stand is unknown


class IterableSource:
    """Batches of any iterable; an iterator is one-shot, anything else starts again with each pass.

    Iterators that have `get_state` and `set_state`, as Grain's, continue where their state was taken.

    Args:
      iterable: yields batches.
      num_batches: batches in a pass; `math.inf` when endless, None when unknown.
    """

    rows = None
    seeks = False

    def __init__(self, iterable: Any, num_batches: Count | None):
        self._iterable = self._described = iterable
        self.num_batches = num_batches
        self.is_one_shot = hasattr(iterable, "__next__")
        self._pass_index = 0
        self._iterator: Any = iterable if self.is_one_shot else None  # the one that the last `read` opened

    @property
    def is_exact(self) -> bool:
        return hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")

    @property
    def pipeline(self) -> list[str]:
        # Grain's datasets have `parents`, and tell their class, their number of workers and, often, their length.
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
        if not self.is_exact:
            return None
        # A copy, as an iterator may return what it goes on to change.
        return {"pass_index": self._pass_index, "iterator": copy.deepcopy(self._iterator.get_state())}

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        return self._read(state["pass_index"], 0, state["iterator"])

    def end_epochs(self, count: int) -> None:
        """Does nothing: passes that do not depend on each other have a state, and others are read."""

    def close(self) -> None:
        """Does nothing: a pass closes its iterator."""

    def _batches(self, elements: Iterator[Any]) -> Iterator[Any]:
        return elements

    def _read(self, pass_index: int, start: int, state: Any = None) -> Generator[Any, None, None]:
        iterator = iter(self._iterable)
        self._pass_index, self._iterator = pass_index, iterator
        if state is not None:
            iterator.set_state(state)
        try:
            yield from self._batches(itertools.islice(iterator, start, None))
        finally:
            # The user's own iterator stays theirs to continue; one that this pass opened ends with it.
            if not self.is_one_shot and hasattr(iterator, "close"):
                iterator.close()


class IndexedSource:
    """Batches of an object with `__getitem__`, such as a `keras.utils.PyDataset`.

    Args:
      items: gives batch i for `items[i]`; its `on_epoch_begin()` and `on_epoch_end()`, if any, are called before the
        first batch of each epoch and after the last one.
      num_batches: batches in a pass, or `math.inf`.
      shuffle: draw the batches in another order in each pass; an endless pass stays in order.
      seed: of the order.
    """

    rows = None
    is_one_shot = False
    is_exact = False  # whatever the object draws at random is its own
    seeks = True
    pipeline: list[str] = []

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
                self._begin_epoch()  # another one, where a pass has several
        finally:
            batches.close()

    def end_epochs(self, count: int) -> None:
        for _ in range(count):
            self._begin_epoch()
            self._is_in_epoch = False
            if hasattr(self._items, "on_epoch_end"):
                self._items.on_epoch_end()

    def close(self) -> None:
        """Does nothing: nothing reads for it."""

    def state(self) -> None:
        """Returns None: the number of the pass and of the batch tell all."""

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        raise ValueError("There is no such state: the data are of another kind now.")

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
        """Adds to an error for which index it was raised: where batches are shuffled, it is not the batch's number."""
        error.add_note(f"It was raised for index {index} of a {type(self._items).__name__}.")

    def _begin_epoch(self) -> None:
        if not self._is_in_epoch:
            self._is_in_epoch = True
            if hasattr(self._items, "on_epoch_begin"):
                self._items.on_epoch_begin()

    def _indices(self, pass_index: int, start: int) -> Iterator[int]:
        if not is_finite(self.num_batches):
            return itertools.count(start)
        if self._shuffle:
            order = np.random.default_rng([self._seed, pass_index]).permutation(self.num_batches)
            return iter(order[start:].tolist())
        return iter(range(start, self.num_batches))


class WeightedSource:
    """Batches `(x, y)` of another source with the weight of each row's class added, computed batch by batch."""

    def __init__(self, source: Source, class_weights: ClassWeights):
        self._source = source
        self._class_weights = class_weights
        self.num_batches = source.num_batches
        self.rows = source.rows
        self.is_one_shot = source.is_one_shot
        self.seeks = source.seeks
        self.pipeline = source.pipeline

    @property
    def is_exact(self) -> bool:
        return self._source.is_exact

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        return self._weighted(self._source.read(pass_index, start))

    def state(self) -> dict[str, Any] | None:
        return self._source.state()

    def read_from(self, state: dict[str, Any]) -> Generator[Any, None, None]:
        return self._weighted(self._source.read_from(state))

    def end_epochs(self, count: int) -> None:
        self._source.end_epochs(count)

    def close(self) -> None:
        self._source.close()

    def _weighted(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        convert = BatchConverter()
        try:
            for element in batches:
                yield map_batch(self._with_weights, convert(element))
        finally:
            batches.close()

    def _with_weights(self, batch: Batch) -> Batch:
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise DataError("`class_weight` cannot be used with batches that have a `sample_weight`.")
        return x, y, self._class_weights(y)
