"""What a strategy is: a mesh, a placement of the state and of the data, and a way to reduce.

Owns the strategy in scope. The loop, the step and the callbacks work with any strategy through this class.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.data import Group
from trainer.distribute.collectives import MeshReplicaContext
from trainer.distribute.devices import default_devices
from trainer.distribute.placement import PlacedGroup, pad_rows
from trainer.replica import ReplicaContext

REPLICA_AXIS = "replica"


class Strategy:
    """Runs each step on a group of replicas, one per device, that stay in sync.

    A strategy with one device is a mesh of size one and takes the same path as any other.

    Args:
      devices: the devices, one replica each.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.mesh = Mesh(np.asarray(devices), (REPLICA_AXIS,))
        self._state_sharding = NamedSharding(self.mesh, PartitionSpec())
        self._logs_sharding = NamedSharding(self.mesh, PartitionSpec())
        self._batch_sharding = NamedSharding(self.mesh, PartitionSpec(None, REPLICA_AXIS))
        self._mask_sharding = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))
        self._counts: dict[int, jax.Array] = {}

    def __repr__(self) -> str:
        devices = ", ".join(f"{device.platform}:{device.id}" for device in self.mesh.devices.flat)
        return f"{type(self).__name__}({devices})"

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part in each step."""
        return self.mesh.devices.size

    @property
    def state_sharding(self) -> NamedSharding:
        """Where the leaves of a `TrainState` live: a copy on each device."""
        return self._state_sharding

    @property
    def logs_sharding(self) -> NamedSharding:
        """Where running logs live: a copy on each device."""
        return self._logs_sharding

    @property
    def state_spec(self) -> PartitionSpec:
        """How `shard_map` hands the state to a replica."""
        return self._state_sharding.spec

    @property
    def batch_spec(self) -> PartitionSpec:
        """How `shard_map` splits a group of batches, whose leaves are `(batches, rows, ...)`."""
        return self._batch_sharding.spec

    @property
    def mask_spec(self) -> PartitionSpec:
        """How `shard_map` splits a mask of rows."""
        return self._mask_sharding.spec

    def replica_context(self, rows: int, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the replica being traced inside `shard_map` over `mesh`.

        Args:
          rows: the replica's rows, padding included.
          row_mask: float32 of shape `(rows,)`, 0.0 for padding; None for a batch without any.
        """
        packs = self.mesh.devices.flat[0].platform == "cpu"
        return MeshReplicaContext(REPLICA_AXIS, self.num_replicas_in_sync, packs, rows, row_mask)

    def place_state(self, tree: Any) -> Any:
        """Returns host or device arrays as arrays placed like the state; JAX arrays may share their buffers."""
        # JAX would use the memory of a numpy array on CPU, and so see what its owner writes there later.
        owned = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), tree)
        return jax.device_put(owned, self.state_sharding)

    def place_group(self, group: Group, stack_size: int | None = None) -> PlacedGroup:
        """Returns a group of batches placed on the devices, rows split over the replicas.

        A batch whose rows do not divide by the number of replicas is padded with repeats of its own rows, and gets a
        mask. A group shorter than `stack_size` is padded with unused batches, so that all groups have one shape.
        """
        rows = math.ceil(group.rows / self.num_replicas_in_sync) * self.num_replicas_in_sync
        data, mask = group.data, None
        if rows != group.rows:
            data = jax.tree.map(lambda leaf: pad_rows(leaf, rows, axis=1), data)
            mask = jax.device_put((np.arange(rows) < group.rows).astype(np.float32), self._mask_sharding)
        if stack_size is not None and stack_size > group.count:
            data = jax.tree.map(lambda leaf: pad_rows(leaf, stack_size, axis=0), data)
        if group.count not in self._counts:
            self._counts[group.count] = jax.device_put(np.int32(group.count), self.logs_sharding)
        return PlacedGroup(
            data=jax.device_put(data, self._batch_sharding),
            mask=mask,
            device_count=self._counts[group.count],
            count=group.count,
            rows=group.rows,
            first=group.first,
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the strategy of every model that is made inside the `with` block."""
        if _scopes.stack and _scopes.stack[-1] is not self:
            raise RuntimeError(f"The scope of {self!r} was entered inside that of {_scopes.stack[-1]!r}. "
                               "A model belongs to one strategy: leave the outer scope first.")
        _scopes.stack.append(self)
        try:
            yield self
        finally:
            _scopes.stack.pop()


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Strategy] = []


_scopes = _Scopes()
_default: list[Strategy] = []


def has_strategy() -> bool:
    """Returns whether the caller is inside a strategy's scope."""
    return bool(_scopes.stack)


def get_strategy() -> Strategy:
    """Returns the strategy in scope; without one, that of all local accelerators (one device on a CPU-only machine)."""
    if _scopes.stack:
        return _scopes.stack[-1]
    if not _default:
        _default.append(Strategy(default_devices()))
    return _default[0]
