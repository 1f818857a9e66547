"""Datasets whose batches are split over replicas, for custom training loops."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from trainer.core.errors import describe
from trainer.core.types import Data, PyTree
from trainer.data import DataError
from trainer.data.adapt import adapt
from trainer.data.prefetch import prefetch
from trainer.data.reader import Reader
from trainer.data.sharding.auto_shard import policy_of
from trainer.data.sharding.processes import Channel, Processes
from trainer.data.sources.groups import Group
from trainer.distribute.cluster import ProcessGroup, waiting
from trainer.distribute.placement.global_batch import rows_of_replicas
from trainer.distribute.placement.placement import pad_rows, replicas_here, replicas_to_devices, to_devices
from trainer.distribute.replica.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Input of a function that makes a dataset, as in `tf.distribute.InputContext`.

    Attributes:
      num_input_pipelines: number of processes that read data.
      input_pipeline_id: the index of this process among them.
      num_replicas_in_sync: number of replicas of a step.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns a replica's share of the rows of a batch.

        Raises:
          ValueError: if the rows cannot be shared evenly.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(f"`global_batch_size` must divide by the {self.num_replicas_in_sync} replicas. "
                             f"Received: {global_batch_size}.")
        return global_batch_size // self.num_replicas_in_sync


class DistributedDataset:
    """Batches split by rows over the replicas; each iteration is another pass over the data.

    With several processes, all of them must make it and iterate over it, and none may stop before the others.

    Args:
      data: batches, in any form that `fit` accepts; if batches are dealt, this process's own batches.
      num_replicas: number of replicas that share each batch.
      sharding: sharding of arrays of shape `(replicas, rows, ...)`.
      processes: the processes with the devices of the replicas, as readers of data.
      group: the same processes, as a group that agrees.
      deals_batches: whether each batch goes whole to the next replica of this process, instead of being split over all.

    Raises:
      ValueError: if the data cannot be used, or batches are dealt and processes share a replica.
    """

    def __init__(self, data: Data, num_replicas: int, sharding: Sharding, processes: Processes,
                 group: ProcessGroup, deals_batches: bool = False):
        if isinstance(data, tuple) and not hasattr(data, "_fields") and all(hasattr(leaf, "shape") for leaf in data):
            raise TypeError(f"The data are batches, and not arrays. Received: {describe(data)}. Make batches of them: "
                            "`trainer.data.Dataset.from_arrays((x, y)).batch(32)`.")
        if processes.count > 1 and not deals_batches:
            with waiting("device"):
                group.assert_consistent("data for `experimental_distribute_dataset`",
                                        lambda: {"auto_shard_policy": policy_of(data).value})
        # Dealt batches belong to each process, and no other process reads them.
        self._source = adapt(data, processes=Processes() if deals_batches else processes)
        self._num_replicas = num_replicas
        self._sharding = sharding
        self._channel = Channel(processes.group)
        self._local_replicas = num_replicas // processes.count
        first = processes.index * self._local_replicas
        self._is_even = replicas_here(num_replicas, sharding) == list(range(first, first + self._local_replicas))
        self._deals_batches = deals_batches
        self._batches_per_element = self._local_replicas if deals_batches else 1
        self._passes = 0
        if deals_batches:
            self._check_even()

    def __len__(self) -> int:
        batches = self._source.num_batches
        if batches is None or math.isinf(batches):
            raise TypeError("The length of these data is not known.")
        return math.ceil(batches / self._batches_per_element)

    def __iter__(self) -> Iterator[Any]:
        reader = Reader(self._source, None if self._source.num_batches != math.inf else sys.maxsize)
        groups, close = reader.read(self._passes if self._source.num_batches != math.inf else 0), reader.close
        self._passes += 1
        elements = self._dealt(groups, self._channel.open()) if self._deals_batches else map(self._split, groups)
        try:
            with prefetch(elements, self._on_replicas) as placed:
                while True:
                    with waiting("data"):
                        element = next(placed, None)
                    if element is None:
                        return
                    yield element
        finally:
            close()

    def _dealt(self, groups: Iterator[Group], channel: Channel) -> Iterator[_Element]:
        """Yields elements of up to one batch for each replica of this process, as long as any process has batches."""
        last: list[Group] = []
        while True:
            with channel.reports_errors():
                hand = list(itertools.islice(groups, self._local_replicas))
                last = hand or last
            rows = [group.rows for group in hand] + [0] * (self._local_replicas - len(hand))
            counts = list(itertools.chain.from_iterable(channel.all(rows if last else [None])))
            if not any(counts):
                return
            if None in counts:
                raise DataError("A process has no batch at all, but others have: the function given to "
                                "`distribute_datasets_from_function` must return some for each.")
            sources = [group.data for group in hand] + [last[0].data] * (self._local_replicas - len(hand))
            yield _Element(_stacked_batches(sources, max(counts)), counts, max(counts))

    def _split(self, group: Group) -> _Element:
        if group.counts is None:
            counts, most = rows_of_replicas([group.rows], self._num_replicas)
            return _Element(_split_rows(group.data, self._num_replicas, most), counts, most)
        self._check_even()
        counts, most = rows_of_replicas(group.counts, self._local_replicas)
        return _Element(_split_rows(group.data, self._local_replicas, most), counts, most)

    def _check_even(self) -> None:
        if not self._is_even:
            raise ValueError("Each process must have as many replicas as the others, of its own devices alone, and one "
                             "process after another. Give all processes the same data, and AutoShardPolicy.DATA.")

    def _on_replicas(self, element: _Element) -> Any:
        mask = None
        if min(element.counts) < element.rows:
            is_real = np.arange(element.rows) < np.array(element.counts)[:, None]
            mask = to_devices(is_real.astype(np.float32), self._sharding)
        placed = replicas_to_devices(element.data, self._num_replicas, self._sharding)
        return jax.tree.map(lambda leaf: PerReplica(leaf, mask), placed)


class _Element(NamedTuple):
    """Arrays `(replicas, rows, ...)` of all or of this process's replicas, with counts of real rows of all replicas."""

    data: Any
    counts: list[int]
    rows: int


def _split_rows(tree: PyTree, replicas: int, rows: int) -> Any:
    """Returns arrays `(replicas, rows, ...)` of arrays `(1, up to replicas * rows, ...)`."""
    def split(leaf: np.ndarray) -> np.ndarray:
        return _padded(leaf, replicas * rows).reshape(replicas, rows, *leaf.shape[2:])

    return jax.tree.map(split, tree)


def _stacked_batches(batches: list[Any], rows: int) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate([_padded(leaf, rows) for leaf in leaves]), *batches)


def _padded(leaf: np.ndarray, rows: int) -> np.ndarray:
    if leaf.shape[1] == rows:
        return leaf
    return pad_rows(leaf, rows, axis=1) if leaf.shape[1] else np.zeros((1, rows, *leaf.shape[2:]), leaf.dtype)
