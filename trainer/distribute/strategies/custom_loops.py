"""Methods of a strategy for custom training loops: run functions on the replicas, and split data over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from trainer.core.compile.entry_points import entry_point
from trainer.core.replica_context import ReduceOp
from trainer.core.types import ArrayTree, Data, PyTree
from trainer.data import Dataset
from trainer.data.sharding.processes import Processes
from trainer.distribute.cluster import ProcessGroup
from trainer.distribute.placement.placement import replicas_here, replicas_to_devices
from trainer.distribute.replica.custom_loops import ReplicaRunner
from trainer.distribute.replica.distributed_dataset import DistributedDataset, InputContext
from trainer.distribute.replica.per_replica import PerReplica, is_per_replica, map_values


class ValueContext(NamedTuple):
    """Input of a function that makes the value of a replica, as in `tf.distribute`.

    Attributes:
      replica_id_in_sync_group: the index of the replica.
      num_replicas_in_sync: number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class CustomLoops:
    """Methods of `Strategy` for custom training loops, as in `tf.distribute`."""

    _runner: ReplicaRunner
    _rows_sharding: NamedSharding
    processes: Processes
    process_group: ProcessGroup

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that take part in each step."""
        raise NotImplementedError

    @entry_point
    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs a function on every replica, each with its own rows.

        The function is compiled once per function and shapes. Each replica receives its part of the batches of a
        distributed dataset and of other `PerReplica` values. All other values are mirrored. NNX modules and optimizers
        are updated in place. Nothing is donated.

        Args:
          fn: a pure function of arrays; inside it, `get_replica_context()` reduces over the replicas.
          args: positional arguments of `fn`.
          kwargs: keyword arguments of `fn`.

        Returns:
          The outputs of `fn`: a TrainState is mirrored, and every other array is a `PerReplica`.

        Raises:
          TypeError: if an argument or a result is not an array or a state object (arguments may also be hashable
            constants), or if `fn` turns traced values into Python values.
          ValueError: if `fn` changes a state by padding rows, or if `apply_gradients`, without `reduce`, would average
            gradients that are scaled for a sum or are already summed.

        Source: `tf.distribute.Strategy.run`.
        """
        return self._runner.run(fn, args, kwargs or {})

    @entry_point
    def reduce(self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None = None) -> Any:
        """Returns the sum or the mean of per-replica values over the replicas.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value: a result of `run`, a single value or a tree. A value that is not per-replica counts once per replica.
          axis: an axis of each replica's value to reduce as well, such as 0 for the rows; each real row counts once.

        Raises:
          ValueError: if the values have no such axis.
        """
        op = ReduceOp.of(reduce_op)

        def reduced(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                leaf = PerReplica(jnp.stack([jnp.asarray(leaf)] * self.num_replicas_in_sync))
            return leaf.reduced(op, axis)

        return map_values(reduced, value)

    @entry_point
    def gather(self, value: PyTree, axis: int = 0) -> Any:
        """Returns per-replica values concatenated along an axis, on the host and without padding rows.

        With several processes, all of them must call this, and all get the values of all replicas.
        """
        def gathered(leaf: Any) -> np.ndarray:
            values = leaf.values if is_per_replica(leaf) else (leaf,) * self.num_replicas_in_sync
            return np.concatenate(values, axis)

        return map_values(gathered, value)

    @entry_point
    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns the values of the replicas of this process as a tuple, on the host and without padding rows."""
        leaves, structure = jax.tree.flatten(value, is_leaf=is_per_replica)
        count = len(replicas_here(self.num_replicas_in_sync, self._rows_sharding))
        locals_ = [leaf.local_values if is_per_replica(leaf) else (leaf,) * count for leaf in leaves]
        return tuple(jax.tree.unflatten(structure, [values[index] for values in locals_]) for index in range(count))

    def experimental_distribute_dataset(self, dataset: Data) -> DistributedDataset:
        """Returns an iterable over the batches of a dataset, each split by rows over the replicas.

        Args:
          dataset: batches, in any form that `fit` accepts. A `trainer.data.Dataset` that shuffles uses a new order in
            each iteration. Several processes share the batches according to their `AutoShardPolicy`.
        """
        return DistributedDataset(
            dataset, self.num_replicas_in_sync, self._rows_sharding, self.processes, self.process_group)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], Any]) -> DistributedDataset:
        """Returns an iterable whose elements have one batch of a dataset for each replica.

        Args:
          dataset_fn: returns a dataset from an `InputContext`. Each of its batches has the rows of a single replica.
            Each process calls the function and gives the batches to its own replicas; the batches are not sharded
            further.

        Raises:
          ValueError: if processes share a replica.
        """
        dataset = dataset_fn(InputContext(self.processes.count, self.processes.index, self.num_replicas_in_sync))
        return DistributedDataset(
            dataset, self.num_replicas_in_sync, self._rows_sharding, self.processes, self.process_group,
            deals_batches=True)

    def make_experimental_numpy_dataset(self, numpy_input: ArrayTree) -> Dataset:
        """Returns a `Dataset` of arrays, to be batched and distributed."""
        return Dataset.from_arrays(numpy_input)

    experimental_make_numpy_dataset = make_experimental_numpy_dataset

    @entry_point
    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns per-replica values, a tree of `PerReplica`.

        Args:
          value_fn: returns the value of a replica from a `ValueContext`. It is called for the replicas of this process
            and must return the same structure and shapes for each.
        """
        replicas = self.num_replicas_in_sync
        values = [value_fn(ValueContext(index, replicas)) for index in replicas_here(replicas, self._rows_sharding)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
        return jax.tree.map(PerReplica, replicas_to_devices(stacked, replicas, self._rows_sharding))
