"""Global batches from rows read by each process.

Owns the placement of these rows. No process sends rows to another: if a replica computes rows of another process, all
rows are placed where they were read, and the step gathers its rows from there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.data.resident import ResidentBatches
from trainer.data.sharding.processes import Processes
from trainer.data.sources.arrays import aligned_empty
from trainer.data.sources.groups import Group
from trainer.distribute.placement.placement import to_devices

_PROCESS_AXIS, _DEVICE_AXIS = "process", "device"


def place_global_batch(group: Group, rows: int, sharding: NamedSharding, processes: Processes) -> Any:
    """Returns global batches on the devices, from the rows that each process has.

    Args:
      group: the group, with `counts`.
      rows: number of rows of the padded batches.
      sharding: sharding of arrays `(batches, rows, ...)`.
      processes: the processes that have the devices of the mesh.

    Returns:
      A tree of arrays `(capacity, rows, ...)`, padded with repeated rows; or `ResidentBatches` of `rows` rows each.
    """
    assert group.counts is not None, "this process has all rows"
    assert len(group.counts) == processes.count, "the strategy's processes read the data"
    capacity = jax.tree.leaves(group.data)[0].shape[0]
    if _lie_in_place(group.counts, rows, sharding):
        start = sum(group.counts[:processes.index])
        return jax.tree.map(lambda leaf: _placed_as_they_lie(leaf, start, rows, sharding), group.data)
    # A power of two, so that few programs serve all distributions of rows over processes.
    per_process = capacity * 2 ** (max(group.counts) - 1).bit_length()
    everywhere = _sharding_by_process(sharding.mesh, processes.count)
    arrays = jax.tree.map(lambda leaf: _placed_by_process(leaf, per_process, everywhere), group.data)
    return ResidentBatches(arrays, to_devices(_numbers(group.counts, capacity, rows, per_process), sharding))


@functools.lru_cache(maxsize=64)
def _lie_in_place(counts: Sequence[int], rows: int, sharding: NamedSharding) -> bool:
    """Returns whether every device needs only rows of its own process."""
    stops = list(itertools.accumulate(counts))
    total = stops[-1]
    indices: dict[Any, Any] = dict(sharding.devices_indices_map((1, rows)))
    place = {process: place for place, process in enumerate(sorted({device.process_index for device in indices}))}
    for device, (_, index) in indices.items():
        process = place[device.process_index]
        first, last, _ = index.indices(rows)
        first, last = min(first, total), min(last, total)
        begin, end = stops[process] - counts[process], stops[process]
        if counts[process] == 0 or (first < last and not begin <= first <= last <= end):
            return False
    return True


def _placed_as_they_lie(leaf: np.ndarray, start: int, rows: int, sharding: NamedSharding) -> jax.Array:
    own = leaf.shape[1]

    def rows_at(index: Any) -> np.ndarray:
        first, last, _ = index[1].indices(rows)
        if last - start <= own:
            return leaf[:, first - start:last - start]
        return np.take(leaf, (np.arange(first, last) - start) % own, axis=1)

    return jax.make_array_from_callback((leaf.shape[0], rows, *leaf.shape[2:]), sharding, rows_at)


@functools.lru_cache(maxsize=8)
def _sharding_by_process(mesh: Mesh, count: int) -> NamedSharding:
    devices = np.asarray(mesh.devices).reshape(-1)
    if devices.size % count or any(len({device.process_index for device in row}) > 1
                                   for row in devices.reshape(count, -1)):
        raise ValueError("Batches whose rows do not lie where they were read need a strategy with as many devices in "
                         f"each process, one process after another. Received, by device: "
                         f"{[device.process_index for device in devices]}.")
    return NamedSharding(Mesh(devices.reshape(count, -1), (_PROCESS_AXIS, _DEVICE_AXIS)), PartitionSpec(_PROCESS_AXIS))


def _placed_by_process(leaf: np.ndarray, per_process: int, sharding: NamedSharding) -> jax.Array:
    """Returns all rows of a process on each of its devices, in an array `(processes * per_process, ...)`."""
    flat = leaf.reshape(-1, *leaf.shape[2:])
    if len(flat) < per_process:
        padded = aligned_empty((per_process, *leaf.shape[2:]), leaf.dtype)
        padded[:len(flat)], padded[len(flat):] = flat, 0
        flat = padded
    shape = (per_process * sharding.mesh.shape[_PROCESS_AXIS], *leaf.shape[2:])
    return jax.make_array_from_callback(shape, sharding, lambda index: flat)


def _numbers(counts: Sequence[int], capacity: int, rows: int, per_process: int) -> np.ndarray:
    """Returns the position of each row of each batch, padded to `rows`: int32 of shape `(capacity, rows)`."""
    of_batches = [np.concatenate([process * per_process + batch * count + np.arange(count)
                                  for process, count in enumerate(counts)]) for batch in range(capacity)]
    return np.stack(of_batches)[:, np.arange(rows) % sum(counts)].astype(np.int32)


def rows_of_replicas(counts: Sequence[int], local_replicas: int) -> tuple[list[int], int]:
    """Returns the number of rows of each replica if each process splits its own rows, and the largest number.

    >>> rows_of_replicas([5, 2], 2)
    ([3, 2, 2, 0], 3)
    """
    most = max(math.ceil(count / local_replicas) for count in counts)
    return [min(max(count - replica * most, 0), most) for count in counts for replica in range(local_replicas)], most
