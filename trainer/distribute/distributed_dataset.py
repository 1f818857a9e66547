"""Datasets whose batches are split over replicas, for loops of one's own."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from trainer.data import Group, Reader, adapt, prefetch
from trainer.distribute.per_replica import PerReplica
from trainer.distribute.placement import pad_rows, to_devices


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What a function that makes a dataset is told, as in `tf.distribute.InputContext`.

    Attributes:
      num_input_pipelines: how many processes read data.
      input_pipeline_id: which of them this is.
      num_replicas_in_sync: how many replicas a step has.
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

    Args:
      data: whatever `fit` takes as batches.
      num_replicas: among how many replicas each batch is split.
      sharding: where arrays of shape `(replicas, rows, ...)` go.
      deals_batches: whether each batch goes whole to the next replica, instead of being split over all.
    """

    def __init__(self, data: Any, num_replicas: int, sharding: Sharding, deals_batches: bool = False):
        self._source = adapt(data)
        self._num_replicas = num_replicas
        self._sharding = sharding
        self._deals_batches = deals_batches
        self._batches_per_element = num_replicas if deals_batches else 1
        self._passes = 0

    def __len__(self) -> int:
        batches = self._source.num_batches
        if batches is None or math.isinf(batches):
            raise TypeError("The length of these data is not known.")
        return math.ceil(batches / self._batches_per_element)

    def __iter__(self) -> Iterator[Any]:
        if self._source.num_batches == math.inf:
            groups, close = self._endless_groups(), None
        else:
            reader = Reader(self._source)
            groups, close = reader.read(self._passes), reader.close
        self._passes += 1
        try:
            with prefetch(self._hands(groups), self._place) as placed:
                yield from placed
        finally:
            if close is not None:
                close()

    def _endless_groups(self) -> Iterator[Group]:
        for number, batch in enumerate(self._source.read(0)):
            rows = jax.tree.leaves(batch)[0].shape[0]
            yield Group(jax.tree.map(lambda leaf: np.array(leaf)[None], batch), 1, rows, number)

    def _hands(self, groups: Iterator[Group]) -> Iterator[list[Group]]:
        """Yields what makes one element: a batch to split, or up to one batch for each replica."""
        while hand := list(itertools.islice(groups, self._batches_per_element)):
            yield hand

    def _place(self, hand: list[Group]) -> Any:
        return self._deal(hand) if self._deals_batches else self._split(hand[0])

    def _split(self, group: Group) -> Any:
        per_replica = math.ceil(group.rows / self._num_replicas)
        shape = (self._num_replicas, per_replica)
        total = self._num_replicas * per_replica

        def split(leaf: np.ndarray) -> np.ndarray:
            padded = leaf if total == group.rows else pad_rows(leaf, total, axis=1)
            return padded.reshape(*shape, *leaf.shape[2:])

        mask = None if total == group.rows else (np.arange(total) < group.rows).astype(np.float32).reshape(shape)
        return self._on_replicas(jax.tree.map(split, group.data), mask)

    def _deal(self, hand: list[Group]) -> Any:
        most = max(group.rows for group in hand)
        counts = [group.rows for group in hand] + [0] * (self._num_replicas - len(hand))
        sources = [group.data for group in hand]
        sources += [sources[0]] * (self._num_replicas - len(hand))
        data = jax.tree.map(lambda *leaves: np.concatenate([pad_rows(leaf, most, axis=1) for leaf in leaves]), *sources)
        is_full = all(count == most for count in counts)
        mask = None if is_full else (np.arange(most) < np.array(counts)[:, None]).astype(np.float32)
        return self._on_replicas(data, mask)

    def _on_replicas(self, data: Any, mask: np.ndarray | None) -> Any:
        placed_mask = None if mask is None else to_devices(mask, self._sharding)
        return jax.tree.map(lambda leaf: PerReplica(leaf, placed_mask), to_devices(data, self._sharding))
