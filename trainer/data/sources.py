"""Sources: whatever yields batches, behind one small protocol.

Owns how batches are drawn from a `Dataset`, an iterable, an indexed object and a one-shot iterator. It must not group
batches or know of epochs.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import numpy as np

from trainer.data.arrays import DataError
from trainer.data.batches import Batch, BatchConverter, unpack_x_y_sample_weight
from trainer.data.class_weight import ClassWeights
from trainer.data.dataset import Dataset
from trainer.data.order import Count, is_finite


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
        """Whether there is a single pass, and whoever reads on continues where the last reader stopped."""

    def read(self, pass_index: int, start: int = 0) -> Generator[Batch, None, None]:
        """Returns a generator of the batches of one pass, trees of numpy arrays, leaving out the first `start`.

        Arrays may share memory with the user's pipeline: copy what must outlive the next batch.
        """


class DatasetSource:
    """Batches of a `Dataset`, from any position without reading what comes before it.

    Attributes:
      dataset: the batched dataset.
    """

    is_one_shot = False

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.num_batches = dataset.cardinality
        self.rows = dataset.rows

    def read(self, pass_index: int, start: int = 0) -> Generator[Batch, None, None]:
        return self.dataset.read(pass_index, start)


class IterableSource:
    """Batches of any iterable; an iterator is one-shot, anything else starts anew with each pass.

    Args:
      iterable: yields batches.
      num_batches: batches in a pass; `math.inf` when endless, None when unknown.
    """

    rows = None

    def __init__(self, iterable: Any, num_batches: Count | None):
        self._iterable = iterable
        self.num_batches = num_batches
        self.is_one_shot = hasattr(iterable, "__next__")

    def read(self, pass_index: int, start: int = 0) -> Generator[Batch, None, None]:
        iterator, convert = iter(self._iterable), BatchConverter()
        try:
            for element in itertools.islice(iterator, start, None):
                yield convert(element)
        finally:
            # The user's own iterator stays theirs to continue; one that this pass opened ends with it.
            if not self.is_one_shot and hasattr(iterator, "close"):
                iterator.close()


class IndexedSource:
    """Batches of an object with `__getitem__`, such as a `keras.utils.PyDataset`.

    Args:
      items: gives batch i for `items[i]`; its `on_epoch_end()`, if there is one, is called after each whole pass.
      num_batches: batches in a pass, or `math.inf`.
      shuffle: draw the batches in another order in each pass; an endless pass stays in order.
      seed: of the order.
    """

    rows = None
    is_one_shot = False

    def __init__(self, items: Any, num_batches: Count, shuffle: bool, seed: int):
        self._items = items
        self.num_batches = num_batches
        self._shuffle = shuffle
        self._seed = seed

    def read(self, pass_index: int, start: int = 0) -> Generator[Batch, None, None]:
        convert = BatchConverter()
        for index in self._indices(pass_index, start):
            yield convert(self._items[index])
        if hasattr(self._items, "on_epoch_end"):
            self._items.on_epoch_end()

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

    def read(self, pass_index: int, start: int = 0) -> Generator[Batch, None, None]:
        batches = self._source.read(pass_index, start)
        try:
            for batch in batches:
                x, y, sample_weight = unpack_x_y_sample_weight(batch)
                if sample_weight is not None:
                    raise DataError("`class_weight` cannot be used with batches that have a `sample_weight`.")
                yield x, y, self._class_weights(y)
        finally:
            batches.close()
