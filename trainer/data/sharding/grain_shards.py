"""Grain datasets of which each process loads and maps only its own rows of each batch.

Owns the recognition of datasets by their last steps, and the reading of a batch's own rows. All processes read other
datasets whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from trainer.core.types import Count
from trainer.data.sharding.processes import Processes
from trainer.data.sources.arrays import Batch
from trainer.data.sources.groups import BatchConverter, LocalRows
from trainer.data.sources.sources import IterableSource


class RowsOfBatches:
    """This process's rows of each batch of a Grain dataset, as a data source for Grain whose elements are batches.

    So Grain reads ahead as usual, and iterator states count batches, in any process and for any number of processes.

    Args:
      batches: a `grain.MapDataset` made by `batch`, whose `_batch_size` and `_batch_fn` are read.
      processes: the processes that share the rows.
    """

    def __init__(self, batches: Any, processes: Processes):
        self._batches, self._rows = batches, batches.parents[0]
        self._batch_size: int = batches._batch_size
        self._stack = batches._batch_fn
        self._processes = processes

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        """Returns a batch's index and its rows here; a single row, as a template, if there are none."""
        counts = self.counts(number)
        start = number * self._batch_size + sum(counts[:self._processes.index])
        first = min(start, len(self._rows) - 1)
        stop = max(start + counts[self._processes.index], first + 1)
        return number, self._stack([self._rows[row] for row in range(first, stop)])

    def counts(self, number: int) -> tuple[int, ...]:
        """Returns the number of rows of a batch for each process."""
        start = number * self._batch_size
        return self._processes.rows_of_each(min(self._batch_size, len(self._rows) - start))

    def whole(self, number: int) -> Any:
        """Returns all rows of a batch."""
        return self._batches[number]


class ShardedGrainSource(IterableSource):
    """Batches of a Grain dataset of which this process reads its own rows.

    Args:
      num_batches: batches in a pass.
      rows: reads the rows.
      elements: a dataset with the elements of `rows`.
    """

    def __init__(self, dataset: Any, num_batches: Count | None, rows: RowsOfBatches, elements: Any):
        super().__init__(elements, num_batches)
        self._described = dataset
        self._rows = rows
        self._index = rows._processes.index
        self._whole = functools.lru_cache(maxsize=1)(lambda number: BatchConverter()(rows.whole(number)))

    def _batches(self, elements: Iterator[tuple[int, Any]]) -> Iterator[LocalRows]:
        convert = BatchConverter()
        for number, data in elements:
            counts = self._rows.counts(number)
            own: Batch = jax.tree.map(lambda leaf, count=counts[self._index]: leaf[:count], convert(data))
            yield LocalRows(own, counts, functools.partial(self._whole, number))


class _ByRows:
    """The elements of a Grain dataset, with iterator states that count rows instead of batches."""

    def __init__(self, elements: Any, batch_size: int, length: int):
        self._elements, self._batch_size, self._length = elements, batch_size, length

    def __iter__(self) -> _ByRowsIterator:
        return _ByRowsIterator(iter(self._elements), self._batch_size, self._length)


class _ByRowsIterator:
    def __init__(self, iterator: Any, batch_size: int, length: int):
        self._iterator, self._batch_size, self._length = iterator, batch_size, length

    def __iter__(self) -> _ByRowsIterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> dict[str, int]:
        return {"next_index": min(self._iterator.get_state()["next_index"] * self._batch_size, self._length)}

    def set_state(self, state: dict[str, int]) -> None:
        self._iterator.set_state({"next_index": -(-state["next_index"] // self._batch_size)})

    def close(self) -> None:
        self._iterator.close()


def shard_grain(dataset: Any, num_batches: Count | None, processes: Processes) -> ShardedGrainSource | None:
    """Returns a source that reads this process's rows of a Grain dataset's batches; None if that cannot be exact.

    It needs a `grain.MapDataset` whose last step is `batch` with Grain's default stacking, before or after
    `to_iter_dataset`, and without earlier steps that drop rows.

    Args:
      dataset: any iterable.
      num_batches: batches in a pass, if known.
      processes: the processes that read it.
    """
    if processes.count == 1 or not type(dataset).__module__.startswith("grain."):
        return None
    try:
        found = _batches_and_elements(dataset)
        if found is None or found[0]._batch_fn is not _default_batch_fn():
            return None  # it may combine the rows of a batch
        batches, as_elements = found
        rows = RowsOfBatches(batches, processes)
    except AttributeError:
        return None  # another version of Grain
    return ShardedGrainSource(dataset, num_batches, rows, as_elements(rows))


def _batches_and_elements(dataset: Any) -> tuple[Any, Callable[[RowsOfBatches], Any]] | None:
    """Returns the batches of a known form of dataset, and a function that makes a similar iterable; otherwise None."""
    import grain

    steps = _names_of_steps(dataset)
    if steps[:1] == ["BatchMapDataset"]:
        return dataset, grain.MapDataset.source
    if steps[:2] == ["PrefetchIterDataset", "BatchMapDataset"]:
        options = {"read_options": dataset._read_options, "allow_nones": dataset._allow_nones}
        return dataset.parents[0], lambda rows: grain.MapDataset.source(rows).to_iter_dataset(**options)
    if steps[:1] != ["BatchIterDataset"] or steps[1:2] != ["PrefetchIterDataset"]:
        return None
    reads, size = dataset.parents[0], dataset._batch_size
    try:
        batches = reads.parents[0].batch(size, drop_remainder=dataset._drop_remainder, batch_fn=dataset._batch_fn)
    except ValueError:
        return None  # a step drops rows, so the rows of a batch are unknown before reading
    read_ahead = -(-reads._read_options.prefetch_buffer_size // size)
    options = {"read_options": grain.ReadOptions(min(reads._read_options.num_threads, read_ahead), read_ahead)}
    return batches, lambda rows: _ByRows(
        grain.MapDataset.source(rows).to_iter_dataset(**options), size, len(reads.parents[0]))


def _names_of_steps(dataset: Any) -> list[str]:
    """Returns the kinds of a dataset's last steps, the last step first."""
    names: list[str] = []
    while len(names) < 3 and dataset is not None:
        names.append(type(dataset).__name__)
        parents = dataset.parents
        dataset = parents[0] if len(parents) == 1 else None
    return names


@functools.cache
def _default_batch_fn() -> Any:
    import grain

    return grain.MapDataset.range(1).batch(1)._batch_fn
