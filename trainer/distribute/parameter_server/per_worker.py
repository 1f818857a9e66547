"""Datasets of which every worker has its own: as the chief holds them, and as a worker iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from trainer.distribute.parameter_server.shared import SharedValue


class PerWorkerDataset:
    """What `ClusterCoordinator.create_per_worker_dataset` returns."""

    def __init__(self, dataset_fn: Callable[[], Any] | Any, release: Callable[[str], None]):
        self._make = dataset_fn if callable(dataset_fn) else lambda: dataset_fn
        self._release = release

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._make, self._release)


class PerWorkerIterator(SharedValue):
    """An iterator that each worker has of its own: pass it to scheduled functions, which call `next` on it.

    Workers keep theirs as long as this exists.
    """

    def __init__(self, make: Callable[[], Any], release: Callable[[str], None]):
        super().__init__(WorkerIterator(make), release)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError("An iterator of a per-worker dataset is only readable inside of a scheduled function: "
                           "`coordinator.schedule(step, args=(iterator,))`.")


class WorkerIterator:
    """A worker's iterator over its own dataset, which is made when the first batch is asked for."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._iterator: Iterator[Any] | None = None
        self._failed: str | None = None

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        if self._failed is not None:
            raise RuntimeError(self._failed)
        if self._iterator is None:
            try:
                self._iterator = iter(self._make())
            except Exception as error:
                self._failed = f"The dataset of this worker could not be made: {type(error).__name__}: {error}"
                raise RuntimeError(self._failed) from error
        try:
            return next(self._iterator)
        except StopIteration:
            raise RuntimeError("The dataset of this worker has no more batches. Let it repeat, or schedule fewer "
                               "functions.") from None
