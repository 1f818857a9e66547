"""Base class of strategies: a mesh, a placement of the state and of the data, and a reduction.

Owns the strategy in scope. The loop, the step and the callbacks work with any strategy through this class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core.ambient import state as ambient
from trainer.core.compile.compiler_options import CompilerOptions, compiler_options
from trainer.core.compile.constraints import constrained, constraints_by, ignore, on_mesh, over_axes
from trainer.core.compile.entry_points import entry_point
from trainer.core.compile.jit import on_each_device
from trainer.core.replica_context import ReplicaContext, get_replica_context, in_replica_context
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data.resident import ResidentBatches
from trainer.data.sources.batches import Group
from trainer.data.sources.host_arrays import HostArrays
from trainer.distribute.placement.described import is_described
from trainer.distribute.placement.device_cache import PlacedArrays
from trainer.distribute.placement.devices import default_devices, memory_bytes
from trainer.distribute.placement.global_batch import place_global_batch
from trainer.distribute.placement.input_processes import group_of, processes_of
from trainer.distribute.placement.placement import (
    DATA_FRACTION,
    REPLICA_AXIS,
    PlacedGroup,
    batches_to_devices,
    pad_stack,
    place_arrays,
    replicas_here,
    stacked,
    to_devices,
)
from trainer.distribute.replica.collectives import (
    CrossDeviceOps,
    MeshReplicaContext,
    NcclAllReduce,
    exchange_rows,
)
from trainer.distribute.replica.custom_loops import ReplicaRunner
from trainer.distribute.replica.zero import specs_of
from trainer.distribute.strategies.custom_loops import CustomLoops

if TYPE_CHECKING:
    from trainer.tools.plan import Plan, StateReport


class Strategy(CustomLoops):
    """Runs each step on a group of replicas, one per device, that stay in sync.

    A strategy with a single device is a mesh of size 1 and takes the same code path as any other.

    Args:
      mesh: the devices, with an axis `REPLICA_AXIS`; or a list of devices, one replica each.
      cross_device_ops: the reduction of gradients; `NcclAllReduce()` by default.

    Attributes:
      is_asynchronous: whether train steps run on other processes, which do not wait for each other.
      offloads_state: whether large arrays of the state are in host memory between executions.
      processes: the processes that have the devices of the replicas and read the data together.
      process_group: these processes, and their means of agreement.
      spans_processes: whether there are several such processes, which must all make the same calls.
    """

    is_asynchronous = False
    offloads_state = False

    def __init__(self, mesh: Mesh | Sequence[jax.Device], cross_device_ops: CrossDeviceOps | None = None):
        self.mesh = mesh = mesh if isinstance(mesh, Mesh) else Mesh(np.asarray(mesh), (REPLICA_AXIS,))
        self._cross_device_ops = cross_device_ops or NcclAllReduce()
        self._cross_device_ops.check_replicas(self.num_replicas_in_sync)
        self._whole = NamedSharding(mesh, PartitionSpec())
        # Of groups of batches, whose leaves are `(batches, rows, ...)`: rows are split over the replicas.
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS))
        self._rows_sharding = NamedSharding(mesh, self.rows_spec)
        self._numbers: dict[int, jax.Array] = {}
        self._placed_arrays = PlacedArrays()
        self._runner = ReplicaRunner(self)
        self.process_group = group_of(mesh)
        self.processes = processes_of(mesh, self.num_replicas_in_sync)
        self.spans_processes = self.processes.count > 1

    def __repr__(self) -> str:
        devices = ", ".join(f"{device.platform}:{device.id}" for device in self.mesh.devices.flat)
        return f"{type(self).__name__}({devices})"

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in each step; 1 inside the code of a step that has the whole batch."""
        return 1 if get_replica_context().has_whole_batch else self.mesh.shape[REPLICA_AXIS]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the devices are CPUs, which share their cores with the host's own work."""
        return self.mesh.devices.flat[0].platform == "cpu"

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

    def compiler_options(self, deterministic: bool = False) -> CompilerOptions:
        """Returns XLA's options for a program of all replicas; see `core/compile/compiler_options.py`."""
        options = self._cross_device_ops.options
        return compiler_options(list(self.mesh.devices.flat), deterministic=deterministic, overlap=options.overlap,
                                bytes_per_pack=options.bytes_per_pack)

    @property
    def is_described(self) -> bool:
        """Whether the devices are only described, so that programs can be compiled for them but nothing placed."""
        return is_described(self.mesh.devices.flat[0])

    @property
    def is_chief(self) -> bool:
        """Whether this process is the first, which alone writes shared files."""
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

    @property
    def rows_spec(self) -> PartitionSpec:
        """Partition spec of arrays whose first axis is rows or replicas."""
        return PartitionSpec(REPLICA_AXIS)

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

    # --- the state, here a copy on each device; `replica/replicated_state.py` gives the order of the calls -----------

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns the sharding of each leaf of a state between steps, from a state of arrays or shapes."""
        return jax.tree.map(lambda leaf: self._whole, state)

    def on_devices(self, state: TrainState) -> TrainState:
        """Returns a state in device memory; part of a compiled execution, before its first step."""
        return state

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        """Returns the state that each replica of a step receives, and its partition specs over the replicas."""
        return state, jax.tree.map(lambda leaf: PartitionSpec(), state)

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        """Returns the state after a step, from the state before it and the state scattered by the replicas."""
        return scattered

    def map_over_replicas(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Callable[[Any], Any] = specs_of,
        divides_replicas: bool = True,
    ) -> Any:
        """Returns a function that runs `function` once on each replica, to be called in a compiled function.

        Args:
          function: the computation of a replica, on its part of the arguments.
          in_specs: partition specs of the arguments over the replicas, a prefix of their trees.
          out_specs: returns the partition specs of the outputs from the tree of a replica's outputs. By default outputs
            are equal on all replicas, except those marked as split.
          divides_replicas: whether the compiler divides the computation of a replica over its devices; if False, each
            device computes all of it.
        """
        axes = [axis for axis in self.mesh.axis_names if axis != REPLICA_AXIS]
        manual = [REPLICA_AXIS] if divides_replicas else self.mesh.axis_names
        mapped = on_each_device(function, self.mesh, manual, in_specs, out_specs)
        constrain = ignore if self.mesh.size == 1 or not divides_replicas else over_axes(axes)

        def call(*args: Any) -> Any:
            with ambient.replaced(strategy=self), constraints_by(constrain):  # for `get_strategy` on replicas
                return mapped(*args)

        return call

    @contextlib.contextmanager
    def tracing_whole_batch(self) -> Iterator[None]:
        """Makes this strategy and its mesh current in a block that traces code for a whole batch."""
        constrain = on_mesh(self.mesh) if self.mesh.size > 1 else ignore
        with ambient.replaced(strategy=self), constraints_by(constrain):
            yield

    def with_rows_in_place(self, tree: PyTree) -> Any:
        """Returns arrays whose first axis is rows, split over the replicas; part of a compiled execution.

        If the replicas do not divide the rows, each device gets all rows. XLA could split them unevenly, but then it
        ends the process for the gradient of a sort over rows, and gave other numbers for shards in tests (jax 0.10 and
        0.12).
        """
        replicas = self.mesh.shape[REPLICA_AXIS]
        return tree if replicas == 1 else constrained(tree, jax.tree.map(
            lambda leaf: self._whole if leaf.shape[0] % replicas else self._rows_sharding, tree))

    def with_state_in_place(self, state: TrainState) -> TrainState:
        """Returns a state split as between steps, in device memory; part of a compiled execution."""
        return state if self.mesh.size == 1 else constrained(state, self._device_shardings(state))

    def with_gradients_in_place(self, grads: PyTree) -> Any:
        """Returns gradients of the whole batch, split as the update needs them; part of a compiled execution."""
        return grads

    def _device_shardings(self, state: TrainState) -> TrainState:
        return self.state_shardings(state)

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the traced replica in a function given to `map_over_replicas`.

        Args:
          rows: number of rows of the replica, including padding; None for a function without rows.
          row_mask: float32 of shape `(rows,)`, 0.0 for padding; None for a batch without padding.
        """
        return MeshReplicaContext(*self._context_arguments(rows, row_mask))

    def _context_arguments(self, rows: int | None, row_mask: jax.Array | None) -> tuple[Any, ...]:
        # Packing would gather arrays that are split over other axes.
        replicas = self.mesh.shape[REPLICA_AXIS]
        packs = self.is_on_cpu and self.mesh.devices.size == replicas
        return REPLICA_AXIS, replicas, packs, rows, row_mask, self._cross_device_ops

    def place_state(self, state: TrainState) -> TrainState:
        """Returns a state of host or device arrays placed by this strategy; JAX arrays may share buffers."""
        # On CPU, JAX would share the memory of a numpy array and see later writes by its owner.
        owned = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), state)
        return to_devices(owned, self.state_shardings(owned))

    def gradient_shardings(self, state: TrainState) -> Any:
        """Returns the shardings of the reduced gradients of a state's trained parameters."""
        return jax.tree.map(lambda leaf: self._whole, state.trainable(state.params))

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

    # --- data ------------------------------------------------------------------------------------------------------

    def placed_arrays(self, arrays: HostArrays) -> Any | None:
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
            return self.placed_arrays(arrays)
        return self._placed_arrays.get_or_place(
            arrays, lambda: place_arrays(arrays, sharding, parts), sharding.addressable_devices,
            math.ceil(arrays.nbytes / parts))

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
        replicas, data = self.mesh.shape[REPLICA_AXIS], group.data
        rows = math.ceil(group.rows / replicas) * replicas
        if group.counts is not None:
            data = place_global_batch(group, rows, self._batch_sharding, self.processes)
        else:
            if rows != group.rows:
                data = jax.tree.map(lambda leaf: pad_stack(leaf, group.count, rows), data)
            data = batches_to_devices(data, self._batch_sharding)
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
        exchange = functools.partial(
            exchange_rows, axis_name=REPLICA_AXIS, num_replicas=self.mesh.shape[REPLICA_AXIS])
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

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the strategy of every model made inside the `with` block."""
        outer: Strategy | None = ambient.current().strategy
        if outer is not None and outer is not self:
            raise RuntimeError(f"The scope of {self!r} was entered inside that of {outer!r}. "
                               "A model belongs to one strategy: leave the outer scope first.")
        with ambient.replaced(strategy=self):
            yield self


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
