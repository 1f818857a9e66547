"""Per-worker datasets, which every worker reads separately: on the chief, and in a worker."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from trainer.data.sources.arrays import HostArrays, as_batch
from trainer.data.sources.sources import SampleSource
from trainer.distribute.parameter_server.shared import SharedValue
from trainer.distribute.parameter_server.worker import Worker
from trainer.distribute.replica.distributed_dataset import InputContext


class PerWorkerDataset:
    """Data that each worker reads separately: pass it to `fit`, or pass an iterator over it to scheduled functions.

    `ClusterCoordinator.create_per_worker_dataset` and `ParameterServerStrategy.distribute_datasets_from_function` make
    it.

    Args:
      dataset_fn: returns a worker's data from its `InputContext`.
      num_workers: number of workers.
      release: called with the key of an iterator that no longer exists.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], num_workers: int, release: Callable[[str], None]):
        self._make, self._num_workers, self._release = dataset_fn, num_workers, release

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._make, self._release)

    def sample(self) -> SampleSource:
        """Returns the first batch of worker 0, read by the chief, in place of all batches.

        Raises:
          RuntimeError: if the function raises, or returns no batch.
        """
        iterator = WorkerIterator(self._make, InputContext(self._num_workers))
        try:
            return SampleSource(HostArrays(as_batch(next(iterator))))
        finally:
            iterator.close()


class PerWorkerIterator(SharedValue):
    """An iterator that is separate in each worker: pass it to scheduled functions, which call `next` on it.

    Workers keep their iterators as long as this object exists.
    """

    def __init__(self, make: Callable[[InputContext], Any], release: Callable[[str], None]):
        super().__init__(functools.partial(_iterator_of, make), release)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError("An iterator of a per-worker dataset is only readable inside of a scheduled function: "
                           "`coordinator.schedule(step, args=(iterator,))`. Of the methods of a model, `fit` alone "
                           "reads data on the workers.")


def _iterator_of(make: Callable[[InputContext], Any], worker: Worker) -> WorkerIterator:
    return WorkerIterator(make, InputContext(worker.num_workers, worker.index))


class WorkerIterator:
    """A worker's iterator over its own dataset, made at the first batch."""

    def __init__(self, make: Callable[[InputContext], Any], context: InputContext):
        self._make, self._context = make, context
        self._iterator: Iterator[Any] | None = None
        self._failed: str | None = None

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        if self._failed is not None:
            raise RuntimeError(self._failed)
        if self._iterator is None:
            try:
                self._iterator = iter(self._make(self._context))
            except Exception as error:
                self._failed = f"The dataset of this worker could not be made: {type(error).__name__}: {error}"
                raise RuntimeError(self._failed) from error
        try:
            return next(self._iterator)
        except StopIteration:
            raise RuntimeError("The dataset of this worker has no more batches. Let it repeat, or schedule fewer "
                               "functions.") from None

    def close(self) -> None:
        """Ends the iteration, for example of a generator."""
        with contextlib.suppress(AttributeError):
            self._iterator.close()  # type: ignore[union-attr]
