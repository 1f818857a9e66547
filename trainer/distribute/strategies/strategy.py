"""What a strategy is: a mesh, a placement of the state and of the data, and a way to reduce.

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

from trainer.cluster import ProcessGroup
from trainer.compile.compiler_options import CompilerOptions, compiler_options
from trainer.compile.constraints import constrained, constraints_by, ignore, on_mesh, over_axes
from trainer.compile.entry_points import entry_point
from trainer.compile.jit import on_each_device
from trainer.core.ambient import state as ambient
from trainer.core.replica_context import ReplicaContext, get_replica_context, in_replica_context
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data.resident import ResidentBatches
from trainer.data.sharding.processes import Processes
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

    A strategy with one device is a mesh of size one and takes the same path as any other.

    Args:
      mesh: the devices, with an axis `REPLICA_AXIS`; or a list of them, one replica each.
      cross_device_ops: how gradients are reduced; `NcclAllReduce()` by default.

    Attributes:
      is_asynchronous: whether train steps run on other processes, which do not wait for each other.
      offloads_state: whether large arrays of the state are in the memory of the host between executions.
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
        self._process_group = group_of(mesh)
        self._processes = processes_of(mesh, self.num_replicas_in_sync)

    def __repr__(self) -> str:
        devices = ", ".join(f"{device.platform}:{device.id}" for device in self.mesh.devices.flat)
        return f"{type(self).__name__}({devices})"

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part in each step; 1 to the code of a step that has the whole batch."""
        return 1 if get_replica_context().has_whole_batch else self.mesh.shape[REPLICA_AXIS]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the devices are CPUs, which compute on the cores that the host's own work needs too."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def cross_device_ops_are_xla(self) -> bool:
        """Whether XLA reduces gradients by itself as the strategy's `cross_device_ops` do."""
        return isinstance(self._cross_device_ops, NcclAllReduce)

    @property
    def keeps_arrays(self) -> bool:
        """Whether arrays that are read again and again are to stay on the devices.

        CPU devices have the memory of the host, which gathers rows as fast, and from the arrays as they are.
        """
        return not self.is_on_cpu

    @property
    def gathers_late(self) -> bool:
        """Whether a step gathers parameters again for each use; see `compile/traces/late_gathers.py`."""
        return False

    def compiler_options(self, deterministic: bool = False) -> CompilerOptions:
        """Returns XLA's options for a program of all replicas; see `compile/compiler_options.py`."""
        options = self._cross_device_ops.options
        return compiler_options(list(self.mesh.devices.flat), deterministic=deterministic, overlap=options.overlap,
                                bytes_per_pack=options.bytes_per_pack)

    @property
    def is_described(self) -> bool:
        """Whether the devices are described only: programs can be compiled for them, and nothing can be placed."""
        return is_described(self.mesh.devices.flat[0])

    @property
    def spans_processes(self) -> bool:
        """Whether the replicas are on devices of several processes, all of which must then make the same calls."""
        return self._processes.count > 1

    @property
    def processes(self) -> Processes:
        """The processes that have the replicas' devices, which read the data together."""
        return self._processes

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that have the replicas' devices, and how they agree."""
        return self._process_group

    @property
    def is_chief(self) -> bool:
        """Whether this process is the first, which writes what must be written once."""
        return jax.process_index() == 0

    @property
    def local_replicas(self) -> int:
        """How many of the replicas have devices of this process."""
        return len(replicas_here(self.num_replicas_in_sync, self._rows_sharding))

    @property
    def logs_sharding(self) -> NamedSharding:
        """Where running logs live: a copy on each device."""
        return self._whole

    @property
    def outputs_sharding(self) -> NamedSharding:
        """Where the outputs of `predict` are: where the batches are, or on all devices if other processes have some."""
        hosts = {device.process_index for device in self.mesh.devices.flat}
        return self._batch_sharding if len(hosts) == 1 else self._whole

    @property
    def rows_spec(self) -> PartitionSpec:
        """How arrays whose first axis is rows, or replicas, are split."""
        return PartitionSpec(REPLICA_AXIS)

    def over(self, devices: Sequence[jax.Device]) -> Strategy:
        """Returns a strategy of the same kind and options over other devices.

        Args:
          devices: the devices, which may be described only; see `plan`.

        Raises:
          ValueError: if the strategy cannot use so many.
        """
        made = copy.copy(self)
        Strategy.__init__(made, self._mesh_over(devices), self._cross_device_ops)
        return made

    def _mesh_over(self, devices: Sequence[jax.Device]) -> Mesh | Sequence[jax.Device]:
        return devices

    # --- the state: see `replica/replicated_state.py` for the order of these. Here, a copy on each device. -----------

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns where each leaf of a state lives between steps, from a state of arrays or shapes."""
        return jax.tree.map(lambda leaf: self._whole, state)

    def on_devices(self, state: TrainState) -> TrainState:
        """Returns a state in the memory of the devices; part of a compiled execution, before its first step."""
        return state

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        """Returns what each replica of a step receives for a state, and how that is split over them."""
        return state, jax.tree.map(lambda leaf: PartitionSpec(), state)

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        """Returns the state after a step, from the state before it and what the replicas scattered."""
        return scattered

    def map_over_replicas(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Callable[[Any], Any] = specs_of,
        divides_replicas: bool = True,
    ) -> Any:
        """Returns a function, to be called in a compiled function, that runs `function` once on each replica.

        Args:
          function: what a replica computes, from its part of the arguments.
          in_specs: how each argument is split over the replicas, a prefix of their trees.
          out_specs: returns how the outputs are put together, likewise, from the tree of one replica's. By default they
            are equal on all replicas, but for those that say that they are split.
          divides_replicas: whether the compiler divides what a replica of several devices computes; without, each of
            them computes all of it.
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
        """Has the block, which traces code for a whole batch, see this strategy and its mesh."""
        constrain = on_mesh(self.mesh) if self.mesh.size > 1 else ignore
        with ambient.replaced(strategy=self), constraints_by(constrain):
            yield

    def with_rows_in_place(self, tree: PyTree) -> Any:
        """Returns arrays whose first axis is rows, split over the replicas; part of a compiled execution.

        Where the rows do not divide, each device gets all of them. XLA could split them unevenly, but then ends the
        process for the gradient of a sort of the rows, and was seen to compute other numbers for parts of them (with
        jax 0.10 and 0.12).
        """
        replicas = self.mesh.shape[REPLICA_AXIS]
        return tree if replicas == 1 else constrained(tree, jax.tree.map(
            lambda leaf: self._whole if leaf.shape[0] % replicas else self._rows_sharding, tree))

    def with_state_in_place(self, state: TrainState) -> TrainState:
        """Returns a state that is split as between steps, in the devices' memory; part of a compiled execution."""
        return state if self.mesh.size == 1 else constrained(state, self._device_shardings(state))

    def with_gradients_in_place(self, grads: PyTree) -> Any:
        """Returns gradients of the whole batch, split as the update needs them; part of a compiled execution."""
        return grads

    def _device_shardings(self, state: TrainState) -> TrainState:
        return self.state_shardings(state)

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the replica being traced in a function given to `map_over_replicas`.

        Args:
          rows: the replica's rows, padding included; None for a function that is given no rows.
          row_mask: float32 of shape `(rows,)`, 0.0 for padding; None for a batch without any.
        """
        return MeshReplicaContext(*self._context_arguments(rows, row_mask))

    def _context_arguments(self, rows: int | None, row_mask: jax.Array | None) -> tuple[Any, ...]:
        # To pack arrays that are split over other axes would gather them.
        replicas = self.mesh.shape[REPLICA_AXIS]
        packs = self.is_on_cpu and self.mesh.devices.size == replicas
        return REPLICA_AXIS, replicas, packs, rows, row_mask, self._cross_device_ops

    def place_state(self, state: TrainState) -> TrainState:
        """Returns a state of host or device arrays placed as this strategy keeps it; JAX arrays may share buffers."""
        # JAX would use the memory of a numpy array on CPU, and so see what its owner writes there later.
        owned = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), state)
        return to_devices(owned, self.state_shardings(owned))

    def gradient_shardings(self, state: TrainState) -> Any:
        """Returns where the reduced gradients of the trained parameters of a state live."""
        return jax.tree.map(lambda leaf: self._whole, state.trainable(state.params))

    @entry_point
    def explain(self, model: Any, sample: Any = None, *, batch: Any = None) -> StateReport:
        """Prints and returns how a model's state would be placed, and the bytes that each device would hold.

        Nothing is allocated. The model may have been made under another strategy, to compare.

        Args:
          model: a `trainer.Model`, compiled, so that its optimizer's state is known.
          sample: some rows of inputs `x`, which a model that is not built needs.
          batch: one batch as `fit` would be given it, over all replicas, or `jax.ShapeDtypeStruct`s in its place. Its
            train step is compiled then, and the report has the peak of its memory, what of that gradients, activations
            and temporary buffers take, and the floating-point operations.

        Raises:
          ValueError: if the model is not built and there is neither, or if the strategy cannot place its state.
        """
        from trainer.tools.plan import explain  # built on this room

        return explain(model, self, sample, batch)

    @entry_point
    def plan(
        self, model: Any, sample: Any, topology: Any = None, *, batch_size: int | None = None,
        alternatives: bool | str = "auto", memory_fraction: float = 0.75, verbose: bool = True,
    ) -> Plan:
        """Prints and returns what a train step would take on GPUs that need not be there.

        This is `trainer.plan` with this strategy in the place of the model's, and has its arguments and errors.
        """
        from trainer.tools.plan import plan  # built on this room

        return plan(
            model, sample, topology, strategy=self, batch_size=batch_size, alternatives=alternatives,
            memory_fraction=memory_fraction, verbose=verbose)

    # --- data ------------------------------------------------------------------------------------------------------

    def placed_arrays(self, arrays: HostArrays) -> Any | None:
        """Returns what `place_arrays` made of these arrays before; None if it did not."""
        return self.place_arrays(arrays, forced=True) if arrays in self._placed_arrays else None

    def place_arrays(self, arrays: HostArrays, forced: bool = False) -> Any | None:
        """Returns arrays placed on the devices once, or None if they are too large to be kept there.

        Each device holds all rows if they fit into `DATA_FRACTION` of its memory, or else its share of them if that
        does. Placed arrays are kept as long as `arrays` exists, or until their place is needed: see `PlacedArrays` and
        `device_memory`.

        Args:
          arrays: the arrays.
          forced: place them even if they are too large, split over the replicas.
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
        """The memory of the smallest device of the mesh, which all processes are to know as the same."""
        here = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        least = min(map(memory_bytes, here), default=0)
        return min(map(int, self._process_group.all_gather(str(int(least)), "memory of the devices")))

    def place_group(self, group: Group, arrays: Any = None) -> PlacedGroup:
        """Returns a group of batches placed on the devices, rows split over the replicas.

        Rows that do not divide by the number of replicas are followed by repeats, which the program cuts off. Of a
        group with `counts` this process has some rows only, and the other processes have the rest.

        Args:
          group: the batches; with `arrays`, the numbers of their rows in these.
          arrays: what `place_arrays` returned.
        """
        rows = math.ceil(group.rows / self.num_replicas_in_sync) * self.num_replicas_in_sync
        data = group.data
        if group.counts is not None:
            data = place_global_batch(group, rows, self._batch_sharding, self._processes)
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
          group: what `place_group` returned.
          start: the number in the group of the first batch.
          length: how many batches the stack has capacity for.
        """
        return stacked(group, start, length, self.place_number(start))

    def place_number(self, number: int) -> jax.Array:
        """Returns a small int as an int32 scalar on each device, placed once."""
        if number not in self._numbers:
            self._numbers[number] = to_devices(np.int32(number), self._whole)
        return self._numbers[number]

    def training_data(self, data: Any) -> Any:
        """Returns what `fit` is to read in this process for what a user gave it as `x`."""
        return data

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the strategy of every model that is made inside the `with` block."""
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
    """Returns the strategy in scope; without one, that of all local accelerators (one device on a CPU-only machine).

    The scope holds in this thread, and in those that read data for a `fit` in it.

    Raises:
      RuntimeError: in a process that makes batches for another, in which a strategy is in scope.
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
