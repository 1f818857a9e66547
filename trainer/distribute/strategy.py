"""What a strategy is: a mesh, a placement of the state and of the data, and a way to reduce.

Owns the strategy in scope. The loop, the step and the callbacks work with any strategy through this class.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.data import Dataset, Group
from trainer.distribute.collectives import MeshReplicaContext
from trainer.distribute.devices import default_devices
from trainer.distribute.distributed_dataset import DistributedDataset, InputContext
from trainer.distribute.per_replica import PerReplica, is_per_replica, map_values
from trainer.distribute.placement import PlacedGroup, pad_rows
from trainer.distribute.run import ReplicaRunner
from trainer.replica import ReduceOp, ReplicaContext, in_replica_context

REPLICA_AXIS = "replica"


class ValueContext(NamedTuple):
    """What a function that makes one replica's value is told, as in `tf.distribute`.

    Attributes:
      replica_id_in_sync_group: the replica's number.
      num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


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
        self._runner = ReplicaRunner(self)

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

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the replica being traced inside `shard_map` over `mesh`.

        Args:
          rows: the replica's rows, padding included; None for a function that is given no rows.
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

    # --- loops of one's own ----------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs a function on every replica at once, compiled once per function and shapes.

        Batches of a distributed dataset and other `PerReplica` values reach each replica as its own part. Everything
        else is mirrored. NNX modules and optimizers are updated in place. Nothing is donated.

        Args:
          fn: a pure function of arrays; inside it, `get_replica_context()` reduces over the replicas.
          args: its arguments.
          kwargs: its keyword arguments.

        Returns:
          What `fn` returns, with a TrainState mirrored and every other array a `PerReplica`.

        Raises:
          TypeError: for arguments or results that are not arrays, state objects or, as arguments, hashable constants;
            and for a function that turns traced values into Python values.

        Source: `tf.distribute.Strategy.run`.
        """
        return self._runner.run(fn, args, kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Returns the sum or the mean of per-replica values over the replicas.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value: what `run` returned, one value or a tree. A value that is not per-replica counts once per replica.
          axis: an axis of each replica's value to reduce as well: 0 for the rows, of which each real one counts once.

        Raises:
          ValueError: if the values have no such axis.
        """
        op = ReduceOp.of(reduce_op)

        def reduced(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                leaf = PerReplica(jnp.stack([jnp.asarray(leaf)] * self.num_replicas_in_sync))
            return leaf.reduced(op, axis)

        return map_values(reduced, value)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Returns per-replica values concatenated along an axis, on the host and without rows that pad."""
        return map_values(lambda leaf: np.concatenate(self._local(leaf), axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the value of each replica, on the host and without rows that pad, as a tuple."""
        return tuple(map_values(lambda leaf, at=index: self._local(leaf)[at], value)
                     for index in range(self.num_replicas_in_sync))

    def _local(self, leaf: Any) -> tuple[Any, ...]:
        return leaf.values if is_per_replica(leaf) else (leaf,) * self.num_replicas_in_sync

    def experimental_distribute_dataset(self, dataset: Any) -> DistributedDataset:
        """Returns an iterable of the dataset's batches, each split by rows over the replicas.

        Args:
          dataset: batches as `fit` takes them. A `trainer.data.Dataset` that shuffles does so anew in each iteration.
        """
        return DistributedDataset(dataset, self.num_replicas_in_sync, self._mask_sharding)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Any]) -> DistributedDataset:
        """Returns an iterable whose elements have one batch of a dataset for each replica.

        Args:
          dataset_fn: returns a dataset with a replica's rows in each batch, from an `InputContext`.
        """
        dataset = dataset_fn(InputContext(num_replicas_in_sync=self.num_replicas_in_sync))
        return DistributedDataset(dataset, self.num_replicas_in_sync, self._mask_sharding, deals_batches=True)

    def make_experimental_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Returns a `Dataset` of arrays, to be batched and distributed."""
        return Dataset.from_arrays(numpy_input)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns per-replica values, a tree of `PerReplica`.

        Args:
          value_fn: returns one replica's value, from a `ValueContext`; of the same structure and shapes for each.
        """
        replicas = self.num_replicas_in_sync
        values = [value_fn(ValueContext(index, replicas)) for index in range(replicas)]
        return jax.tree.map(
            lambda *leaves: PerReplica(jax.device_put(np.stack(leaves), self._mask_sharding)), *values)

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


def in_cross_replica_context() -> bool:
    """Returns whether the caller is inside a strategy's scope and outside of any step."""
    return has_strategy() and not in_replica_context()
