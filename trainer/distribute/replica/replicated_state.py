"""State of training in a step over replicas: the contract between a strategy and the steps that it runs.

An execution of `fit` or `strategy.run` takes a state through these methods of `Replicas`. Strategies override them if
they split the state:

    on_devices -> to_replica -> [gather_params -> the step -> scatter_updates] -> from_replicas
    `- once an execution -'     `- on each replica: `ReplicaContext` ---------'

Owns this order. It must not know the computation of a step. `state_reduction.py` combines model state that replicas
have changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core.ambient import state as ambient
from trainer.core.compile.compiler_options import CompilerOptions, compiler_options
from trainer.core.compile.constraints import constrained, constraints_by, ignore, on_mesh, over_axes
from trainer.core.compile.jit import on_each_device
from trainer.core.precision import where_finite
from trainer.core.replica_context import ReplicaContext, get_replica_context
from trainer.core.train_state import TrainState, check_is_overwritten, check_same_structure
from trainer.core.tree_paths import restricted
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import REPLICA_AXIS, ROW_AXES, to_devices
from trainer.distribute.replica.collectives import CrossDeviceOps, MeshReplicaContext, NcclAllReduce
from trainer.distribute.replica.state_reduction import SumOverReplicas, over_replicas
from trainer.distribute.replica.zero import specs_of

Tree = TypeVar("Tree")


class Replicas:
    """The replicas of a mesh, and the state of training on them: here a copy on each device. Base of `Strategy`.

    Args:
      mesh: the devices, with an axis `REPLICA_AXIS`; or a list of devices, one replica each.
      cross_device_ops: the reduction of gradients; `NcclAllReduce()` by default.

    Attributes:
      row_axes: the mesh axes that split rows: "replica", or ("replica", "shard").
      replica_count: number of replicas: of places along these axes.
      is_on_cpu: whether the devices are CPUs, which share their cores with the host's own work.
    """

    def __init__(self, mesh: Mesh | Sequence[jax.Device], cross_device_ops: CrossDeviceOps | None = None):
        self.mesh = mesh = mesh if isinstance(mesh, Mesh) else Mesh(np.asarray(mesh), (REPLICA_AXIS,))
        axes = tuple(axis for axis in ROW_AXES if axis in mesh.shape)
        self.row_axes: str | tuple[str, ...] = axes if len(axes) > 1 else axes[0]
        self.replica_count = math.prod(mesh.shape[axis] for axis in axes)
        self.is_on_cpu: bool = mesh.devices.flat[0].platform == "cpu"
        self._cross_device_ops = cross_device_ops or NcclAllReduce()
        self._cross_device_ops.check_replicas(self.num_replicas_in_sync)
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._rows_sharding = NamedSharding(mesh, self.rows_spec)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in each step; 1 inside the code of a step that has the whole batch."""
        return 1 if get_replica_context().has_whole_batch else self.replica_count

    @property
    def rows_spec(self) -> PartitionSpec:
        """Partition spec of arrays whose first axis is rows or replicas."""
        return PartitionSpec(self.row_axes)

    def compiler_options(self, deterministic: bool = False) -> CompilerOptions:
        """Returns XLA's options for a program of all replicas; see `core/compile/compiler_options.py`."""
        options = self._cross_device_ops.options
        return compiler_options(list(self.mesh.devices.flat), deterministic=deterministic, overlap=options.overlap,
                                bytes_per_pack=options.bytes_per_pack)

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
        axes = [axis for axis in self.mesh.axis_names if axis not in ROW_AXES]
        manual = [axis for axis in self.mesh.axis_names if axis not in axes or not divides_replicas]
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
        replicas = self.replica_count
        return tree if replicas == 1 else constrained(tree, jax.tree.map(
            lambda leaf: self._whole if leaf.shape[0] % replicas else self._rows_sharding, tree))

    def with_state_in_place(self, state: TrainState) -> TrainState:
        """Returns a state split as between steps, in device memory; part of a compiled execution."""
        return state if self.mesh.size == 1 else constrained(state, self._device_shardings(state))

    def layouts(self, state: TrainState) -> Mapping[str, PartitionSpec]:
        """Returns the partition specs of the parameters that are split by their paths; see `ModelParallelStrategy`."""
        return {}

    def with_params_in_place(self, state: TrainState) -> TrainState:
        """Returns a state whose parameters are split as code for the whole batch reads them."""
        return state

    def check_axes(self, state: TrainState, program: Any) -> None:
        """Raises ValueError if a mesh axis splits neither rows, the state, nor an array of a traced step.

        Args:
          state: the state, or its shapes.
          program: the `ClosedJaxpr` of the step.
        """

    def with_gradients_in_place(self, grads: PyTree, layouts: Mapping[str, PartitionSpec]) -> Any:
        """Returns gradients of the whole batch, split as the update needs them; part of a compiled execution.

        Args:
          grads: gradients of parameters.
          layouts: the result of `layouts` for the state.
        """
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
        packs = self.is_on_cpu and self.mesh.devices.size == self.replica_count
        return self.row_axes, self.replica_count, packs, rows, row_mask, self._cross_device_ops

    def place_state(self, state: TrainState) -> TrainState:
        """Returns a state of host or device arrays placed by this strategy; JAX arrays may share buffers."""
        # On CPU, JAX would share the memory of a numpy array and see later writes by its owner.
        owned = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), state)
        return to_devices(owned, self.state_shardings(owned))

    def gradient_shardings(self, state: TrainState) -> Any:
        """Returns the shardings of the reduced gradients of a state's trained parameters."""
        return jax.tree.map(lambda leaf: self._whole, state.trainable(state.params))


def is_state(value: object) -> bool:
    """Returns whether a value is a `TrainState`."""
    return isinstance(value, TrainState)


def map_states(function: Callable[[TrainState], TrainState], tree: Tree) -> Tree:
    """Returns a tree with `function(state)` in place of each `TrainState`."""
    return jax.tree.map(lambda leaf: function(leaf) if is_state(leaf) else leaf, tree, is_leaf=is_state)


def run_on_replicas(
    strategy: Replicas, one_replica: Callable[..., Any], mirrored: Any, args: Sequence[Any],
    arg_specs: Sequence[Any], out_specs: Sequence[Any],
) -> tuple[list[TrainState], tuple[Any, ...]]:
    """Runs a function once on each replica; part of a compiled execution.

    Args:
      strategy: the mesh and the operations on a state.
      one_replica: returns `(states, *outputs)` from `mirrored`, with the states as replicas receive them, and the
        replica's part of `args`. `states` has `(n, state)` for each state that leaves the replica: the state was made
        from the n-th leaf of `mirrored` and returned by `leave_replica`.
      mirrored: a tree of states and arrays that are equal on all replicas. States are in device memory.
      args: other arguments of the function.
      arg_specs: partition spec of each of `args` over the replicas.
      out_specs: partition spec of each of `outputs`.

    Returns:
      The states after the step, and the outputs.
    """
    leaves, structure = jax.tree.flatten(mirrored, is_leaf=is_state)
    received = [strategy.to_replica(leaf) if is_state(leaf) else (leaf, PartitionSpec()) for leaf in leaves]
    values, specs = ([pair[index] for pair in received] for index in (0, 1))
    origins: list[int] = []

    def call(mirrored: list[Any], *args: Any) -> tuple[Any, ...]:
        states, *outputs = one_replica(jax.tree.unflatten(structure, mirrored), *args)
        origins[:] = [origin for origin, _ in states]
        return [state for _, state in states], *outputs

    mapped = strategy.map_over_replicas(
        call, (specs, *arg_specs), lambda outputs: (specs_of(outputs[0]), *out_specs))
    scattered, *outputs = mapped(values, *args)
    states = [finalize_skipped_updates(leaves[origin], strategy.from_replicas(leaves[origin], state))
              for origin, state in zip(origins, scattered, strict=True)]
    return states, tuple(outputs)


def leave_replica(
    context: ReplicaContext, function: str, before: TrainState, after: TrainState,
    sum_over_replicas: SumOverReplicas | None = None,
) -> TrainState:
    """Returns the form in which the state `after`, made from `before` by `function`, leaves a replica.

    Arrays are summed by `sum_over_replicas`, by default in a separate reduction.

    Raises:
      TypeError: if the function changed the structure, shapes or dtypes of the state.
      ValueError: if it trained parameters, but did not overwrite the collection that gradients overwrite.
    """
    after = after.replace(model_state=restricted(after.model_state, before.model_state))
    check_same_structure(function, before, after)
    check_is_overwritten(function, before, after)
    model_state = over_replicas(before.model_state, after.model_state, context, sum_over_replicas)
    return context.scatter_updates(before, after.replace(model_state=model_state))


def finalize_skipped_updates(before: TrainState, after: TrainState) -> TrainState:
    """Returns a state after its updates, with the previous model state if an update was skipped.

    All optimizers then have the same loss scale.
    """
    after = after.with_one_loss_scale()
    if before.skipped_updates is None or after.skipped_updates is None:
        return after
    is_made = after.skipped_updates.total == before.skipped_updates.total
    return after.replace(model_state=where_finite(is_made, after.model_state, before.model_state))
