"""Base class of strategies: a mesh, a placement of the state and of the data, and a reduction.

Owns the strategy in scope. The loop, the step and the callbacks work with any strategy through this class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core.ambient import state as ambient
from trainer.core.calls.entry_points import entry_point
from trainer.core.foreign_names import ForeignNames
from trainer.core.replica_context import ReduceOp, in_replica_context
from trainer.core.types import ArrayTree, Data, PyTree
from trainer.data import Dataset
from trainer.data.resident import ResidentBatches
from trainer.data.sources.arrays import HostArrays
from trainer.data.sources.groups import Group
from trainer.distribute.placement.described import is_described
from trainer.distribute.placement.device_cache import PlacedArrays
from trainer.distribute.placement.devices import default_devices, memory_bytes
from trainer.distribute.placement.global_batch import place_global_batch
from trainer.distribute.placement.input_processes import group_of, processes_of
from trainer.distribute.placement.placement import (
    DATA_FRACTION,
    PlacedGroup,
    batches_to_devices,
    copy_to_devices,
    pad_stack,
    replicas_here,
    replicas_to_devices,
    stacked,
    to_devices,
)
from trainer.distribute.replica.collectives import CrossDeviceOps, NcclAllReduce, exchange_rows
from trainer.distribute.replica.custom_loops import ReplicaRunner
from trainer.distribute.replica.distributed_dataset import DistributedDataset, InputContext
from trainer.distribute.replica.per_replica import PerReplica, ValueContext, is_per_replica, map_values
from trainer.distribute.replica.replicated_state import Replicas
from trainer.distribute.replica.tensorflow_names import missing

if TYPE_CHECKING:
    from trainer.tools.plan import Plan, StateReport


class Strategy(Replicas, ForeignNames):
    """Runs each step on a group of replicas, one per device, that stay in sync.

    A strategy with a single device is a mesh of size 1 and takes the same code path as any other.

    Args:
      mesh: the devices, with an axis `REPLICA_AXIS`; or a list of devices, one replica each.
      cross_device_ops: the reduction of gradients; `NcclAllReduce()` by default.

    Attributes:
      is_described: whether programs can be compiled for the devices, which are only described, but nothing placed.
      is_asynchronous: whether train steps run on other processes, which do not wait for each other.
      offloads_state: whether large arrays of the state are in host memory between executions.
      processes: the processes that have the devices of the replicas and read the data together.
      process_group: these processes, and their means of agreement.
      spans_processes: whether there are several such processes, which must all make the same calls.
    """

    _foreign_names = missing("Strategy")
    is_asynchronous = False
    offloads_state = False

    if not TYPE_CHECKING:  # type checkers refuse `with strategy:` themselves

        def __enter__(self) -> NoReturn:
            raise TypeError(f"`with` takes a scope. Received: {type(self).__name__}. Write `with strategy.scope():`.")

        def __exit__(self, *error: object) -> None:
            """Is not called: `with` needs both methods to call the first."""

    def __init__(self, mesh: Mesh | Sequence[jax.Device], cross_device_ops: CrossDeviceOps | None = None):
        super().__init__(mesh, cross_device_ops)
        self.is_described = is_described(self.mesh.devices.flat[0])
        # Of groups of batches, whose leaves are `(batches, rows, ...)`: rows are split over the replicas.
        self._batch_sharding = NamedSharding(self.mesh, PartitionSpec(None, self.row_axes))
        self._numbers: dict[int, jax.Array] = {}
        self._placed_arrays = PlacedArrays()
        self._runner = ReplicaRunner(self)
        self.process_group = group_of(self.mesh)
        self.processes = processes_of(self.mesh, self.num_replicas_in_sync)
        self.spans_processes = self.processes.count > 1

    def __repr__(self) -> str:
        devices = ", ".join(f"{device.platform}:{device.id}" for device in self.mesh.devices.flat)
        return f"{type(self).__name__}({devices})"

    @property
    def cross_device_ops_are_xla(self) -> bool:
        """Whether XLA's own reduction of gradients equals the strategy's `cross_device_ops`."""
        return isinstance(self._cross_device_ops, NcclAllReduce)

    @property
    def keeps_arrays(self) -> bool:
        """Whether arrays that are read repeatedly stay on the devices.

        CPU devices share host memory, and the host gathers rows from the original arrays just as fast.
        """
        return not self.is_on_cpu

    @property
    def gathers_late(self) -> bool:
        """Whether a step gathers parameters again for each use; see `core/compile/traces/late_gathers.py`."""
        return False

    @property
    def is_chief(self) -> bool:
        """Whether this process is the first, the only process that writes shared files."""
        return jax.process_index() == 0

    @property
    def local_replicas(self) -> int:
        """Number of replicas with devices of this process."""
        return len(replicas_here(self.num_replicas_in_sync, self._rows_sharding))

    @property
    def logs_sharding(self) -> NamedSharding:
        """Sharding of running logs: a copy on each device."""
        return self._whole

    @property
    def outputs_sharding(self) -> NamedSharding:
        """Sharding of the outputs of `predict`: as the batches, or replicated if there are several processes."""
        hosts = {device.process_index for device in self.mesh.devices.flat}
        return self._batch_sharding if len(hosts) == 1 else self._whole

    def over(self, devices: Sequence[jax.Device]) -> Strategy:
        """Returns a strategy of the same kind and options over other devices.

        Args:
          devices: the devices, which may be only described; see `plan`.

        Raises:
          ValueError: if the strategy cannot use this number of devices.
        """
        made = copy.copy(self)
        Strategy.__init__(made, self._mesh_over(devices), self._cross_device_ops)
        return made

    def _mesh_over(self, devices: Sequence[jax.Device]) -> Mesh | Sequence[jax.Device]:
        return devices

    @entry_point
    def explain(self, model: Any, sample: Any = None, *, batch: Any = None) -> StateReport:
        """Prints and returns the placement of a model's state, and the bytes that each device would hold.

        Nothing is allocated. The model may have been made under another strategy, for comparison.

        Args:
          model: a compiled `trainer.Model`, whose optimizer state is therefore known.
          sample: some rows of inputs `x`, required for a model that is not built.
          batch: a batch over all replicas, as given to `fit`, or `jax.ShapeDtypeStruct`s instead. If given, its train
            step is compiled, and the report adds the step's peak memory, the shares of gradients, activations and
            temporary buffers, and the floating-point operations.

        Raises:
          ValueError: if the model is not built and neither `sample` nor `batch` is given, or if the strategy cannot
            place its state.
        """
        from trainer.tools.plan import explain  # it imports this module

        return explain(model, self, sample, batch)

    @entry_point
    def plan(
        self, model: Any, sample: Any, topology: Any = None, *, batch_size: int | None = None,
        alternatives: bool | str = "auto", memory_fraction: float = 0.75, verbose: bool = True,
    ) -> Plan:
        """Prints and returns the cost of a train step on GPUs that need not be present.

        Same as `trainer.plan` with this strategy instead of the model's strategy, with the same arguments and errors.
        """
        from trainer.tools.plan import plan  # it imports this module

        return plan(
            model, sample, topology, strategy=self, batch_size=batch_size, alternatives=alternatives,
            memory_fraction=memory_fraction, verbose=verbose)

    # --- custom training loops, as in `tf.distribute` ---------------------------------------------------------------

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
        entries = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
        return jax.tree.map(PerReplica, replicas_to_devices(entries, replicas, self._rows_sharding))

    # --- data ------------------------------------------------------------------------------------------------------

    def cached_arrays(self, arrays: HostArrays) -> Any | None:
        """Returns the earlier result of `place_arrays` for these arrays; None if there is none."""
        return self.place_arrays(arrays, forced=True) if arrays in self._placed_arrays else None

    def place_arrays(self, arrays: HostArrays, forced: bool = False) -> Any | None:
        """Returns arrays placed on the devices once, or None if they are too large to stay there.

        Each device holds all rows if they fit into `DATA_FRACTION` of its memory, or else its share of the rows if that
        fits. Placed arrays stay as long as `arrays` exists, or until their memory is needed: see `PlacedArrays` and
        `device_memory`.

        Args:
          arrays: the arrays.
          forced: whether to place arrays that are too large as well, split over the replicas.
        """
        budget = self._device_bytes * DATA_FRACTION
        if arrays.nbytes <= budget:
            sharding, parts = self._whole, 1
        elif forced or arrays.nbytes <= budget * self.num_replicas_in_sync:
            sharding, parts = self._rows_sharding, self.num_replicas_in_sync
        else:
            return self.cached_arrays(arrays)
        return self._placed_arrays.get_or_place(
            arrays, lambda: copy_to_devices(arrays, sharding, parts), sharding.addressable_devices,
            math.ceil(arrays.nbytes / parts))

    def has_stale_arrays(self, arrays: HostArrays) -> bool:
        """Returns whether the result of `place_arrays` is out of date, because the arrays were written to."""
        return self._placed_arrays.are_stale(arrays)

    @functools.cached_property
    def _device_bytes(self) -> int:
        """Memory of the smallest device of the mesh in bytes, equal in all processes."""
        here = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        least = min(map(memory_bytes, here), default=0)
        return min(map(int, self.process_group.all_gather(str(int(least)), "memory of the devices")))

    def place_group(self, group: Group, arrays: Any = None) -> PlacedGroup:
        """Returns a group of batches placed on the devices, with rows split over the replicas.

        If the replicas do not divide the rows, repeated rows follow, which the program cuts off. If the group has
        `counts`, this process has only some of the rows, and the other processes have the rest.

        Args:
          group: the batches; with `arrays`, the indices of their rows in these.
          arrays: the result of `place_arrays`.
        """
        replicas, data = self.replica_count, group.data
        rows = math.ceil(group.rows / replicas) * replicas
        if group.counts is not None:
            data = place_global_batch(group, rows, self._batch_sharding, self.processes)
        else:
            if rows != group.rows:
                data = jax.tree.map(lambda leaf: pad_stack(leaf, group.count, rows), data)
            place = to_devices if self.is_described else batches_to_devices
            data = place(data, self._batch_sharding)
        return PlacedGroup(
            data=data if arrays is None else ResidentBatches(arrays, data, self._exchange_of(arrays)),
            count=group.count,
            rows=group.rows,
            first=group.first,
            resume_token=group.resume_token,
        )

    def _exchange_of(self, arrays: Any) -> Callable[[Any, jax.Array], Any] | None:
        if self.num_replicas_in_sync == 1:
            return None
        are_split = all(leaf.sharding == self._rows_sharding for leaf in jax.tree.leaves(arrays))
        return self._exchange_rows if are_split else None

    def _exchange_rows(self, arrays: Any, numbers: jax.Array) -> Any:
        exchange = functools.partial(exchange_rows, axis_name=self.row_axes, num_replicas=self.replica_count)
        return self.map_over_replicas(
            exchange, (self.rows_spec, self.rows_spec), lambda rows: jax.tree.map(lambda leaf: self.rows_spec, rows),
        )(arrays, numbers)

    def stack_at(self, group: PlacedGroup, start: int, length: int) -> PlacedGroup:
        """Returns batches of a group of `ResidentBatches` as a stack, gathered on the devices.

        Args:
          group: the result of `place_group`.
          start: the index of the first batch in the group.
          length: capacity of the stack in batches.
        """
        return stacked(group, start, length, self.place_number(start))

    def place_number(self, number: int) -> jax.Array:
        """Returns a small int as an int32 scalar on each device, placed once."""
        if number not in self._numbers:
            self._numbers[number] = to_devices(np.int32(number), self._whole)
        return self._numbers[number]

    def training_data(self, data: Any) -> Any:
        """Returns the data that `fit` reads in this process for the user's `x`."""
        return data

    def scope(self) -> Scope:
        """Makes this the strategy of every model made inside the `with` block."""
        return Scope(self)


class Scope(contextlib.ContextDecorator):
    """The scope of a strategy, for `with`. Warns where `with` is forgotten, and nothing uses the strategy."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._entered: list[contextlib.AbstractContextManager[None]] = []
        self._is_used = False

    def __enter__(self) -> Strategy:
        self._is_used = True
        outer: Strategy | None = ambient.current().strategy
        if outer is not None and outer is not self._strategy:
            raise RuntimeError(f"The scope of {self._strategy!r} was entered inside the scope of {outer!r}. "
                               "A model belongs to one strategy: leave the outer scope first.")
        block = ambient.replaced(strategy=self._strategy)
        block.__enter__()
        self._entered.append(block)
        return self._strategy

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __call__(self, function: Any) -> Any:
        self._is_used = True
        return super().__call__(function)

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn("A scope was made and not entered, so that no model uses its strategy. Write `with "
                          "strategy.scope():`.", RuntimeWarning, stacklevel=2)


_default: list[Strategy] = []


def has_strategy() -> bool:
    """Returns whether the caller is inside a strategy's scope."""
    around = ambient.current()
    return around.strategy is not None or around.strategy_elsewhere is not None


def get_strategy() -> Strategy:
    """Returns the strategy in scope, by default a strategy of all local accelerators (or of one CPU device).

    The scope holds in this thread, and in threads that read data for a `fit` in it.

    Raises:
      RuntimeError: in a process that makes batches for another process with a strategy in scope.
    """
    around = ambient.current()
    in_scope: Strategy | None = around.strategy
    if in_scope is not None:
        return in_scope
    if around.strategy_elsewhere is not None:
        raise RuntimeError(
            f"This process works for another, where {around.strategy_elsewhere} is in scope, and has none of its "
            "devices. Ask for the strategy there: keep what is needed, such as `num_replicas_in_sync`, as an attribute "
            "of the data set, or pass it as an argument.")
    if not _default:
        _default.append(Strategy(default_devices()))
    return _default[0]


def in_cross_replica_context() -> bool:
    """Returns whether the caller is inside a strategy's scope and outside of any step."""
    return has_strategy() and not in_replica_context()
