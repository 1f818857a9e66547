"""Strategies that split the state over the replicas, in device memory or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core.arguments import check_count
from trainer.core.compile.compiler_options import CompilerOptions
from trainer.core.compile.constraints import constrained
from trainer.core.replica_context import ReplicaContext
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.distribute.cluster import cluster_devices
from trainer.distribute.placement.described import is_described
from trainer.distribute.placement.devices import find_devices
from trainer.distribute.placement.placement import REPLICA_AXIS, ROW_AXES, SHARD_AXIS
from trainer.distribute.replica.collectives import NcclAllReduce
from trainer.distribute.replica.communication_options import CommunicationOptions, without_implementation
from trainer.distribute.replica.zero import (
    WHOLE,
    ShardedReplicaContext,
    ShardingRule,
    layout_at,
    layouts_of_optimizer,
    layouts_of_part,
    marked,
    part,
    part_names,
    specs_of,
    unmarked,
)
from trainer.distribute.strategies.mesh_shape import checked_sizes, mesh_of, mesh_over
from trainer.distribute.strategies.strategy import Strategy

LEVELS = ("parameters", "optimizer")
MIN_SHARD_BYTES = 4096
PACKED_GRADIENT_BYTES = 2**25  # of gradients that are reduced together
MIN_HOST_BYTES = 2**16  # transfer time of this size is about the latency of a transfer
Layouts = Mapping[str, PartitionSpec]


class ShardedStrategy(Strategy):
    """A strategy whose state is split over the replicas by the shapes of its arrays.

    Base of `FullyShardedStrategy`, `CentralStorageStrategy` and `ModelParallelStrategy`.

    Args:
      mesh: as in `Strategy`.
      mesh_axis: the mesh axis that splits the state; None if only the layouts of a subclass split it.
      level: "parameters" or "optimizer", as in `FullyShardedStrategy`.
      min_shard_bytes: as in `FullyShardedStrategy`.
      memory_kind: memory of large arrays between executions; None for the default memory of the devices.
      options: `communication_options` of `FullyShardedStrategy`.
      min_host_bytes: smaller arrays stay in device memory; None for the default of `CentralStorageStrategy`.
    """

    def __init__(
        self, mesh: Mesh | Sequence[jax.Device], mesh_axis: str | None, level: str, min_shard_bytes: int,
        memory_kind: str | None = None, options: CommunicationOptions | None = None,
        min_host_bytes: int | None = None,
    ):
        if level not in LEVELS:
            raise ValueError("`level` must be 'parameters' (ZeRO 3: weights and the optimizer's state are split) or "
                             f"'optimizer' (ZeRO 1: its state alone). Received: {level!r}.")
        check_count("min_shard_bytes", min_shard_bytes, 0)
        super().__init__(mesh, NcclAllReduce(options=options))
        _check_host_memory(self.mesh.devices.flat, memory_kind)
        self._rule = ShardingRule(self._num_shards(mesh_axis), min_shard_bytes, level == "parameters", mesh_axis)
        self._memory_kind, self._min_host_bytes = memory_kind, min_host_bytes
        self.offloads_state = memory_kind is not None

    @property
    def _inner_axes(self) -> list[str]:
        """The mesh axes of the devices of a replica."""
        return [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in ROW_AXES]

    def _num_shards(self, mesh_axis: str | None) -> int:
        return 1 if mesh_axis is None else self.mesh.shape[mesh_axis]

    def __repr__(self) -> str:
        is_named = len(self.mesh.axis_names) > 1
        return f"{type(self).__name__}({dict(self.mesh.shape)})" if is_named else super().__repr__()

    @property
    def gathers_late(self) -> bool:
        return self._rule.shards_params and self._rule.num_shards > 1

    def compiler_options(self, deterministic: bool = False) -> CompilerOptions:
        options = super().compiler_options(deterministic)
        if self.gathers_late and options:
            # Whole gradients wait for the others of a pack. XLA counts the bytes of each device's shard.
            options.setdefault("xla_gpu_reduce_scatter_combine_threshold_bytes",
                               PACKED_GRADIENT_BYTES // self._rule.num_shards)
        return options

    def over(self, devices: Sequence[jax.Device]) -> Strategy:
        _check_host_memory(devices, self._memory_kind)
        made = super().over(devices)
        assert isinstance(made, ShardedStrategy), "of the same kind"
        made._rule = self._rule._replace(num_shards=made._num_shards(self._rule.mesh_axis))
        return made

    def _mesh_over(self, devices: Sequence[jax.Device]) -> Mesh | Sequence[jax.Device]:
        return devices if len(self.mesh.axis_names) == 1 else mesh_over(self.mesh, devices, repr(self))

    def _shardings(self, axes: Any, layouts: Layouts) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, axis: NamedSharding(self.mesh, self._rule.spec(axis, layout_at(layouts, path))), axes)

    def state_shardings(self, state: TrainState) -> TrainState:
        placed = self._device_shardings(state)
        if (memory_kind := self._memory_kind) is None:
            return placed

        # CPU devices use host memory, so nothing is transferred.
        limit = (0 if self.is_on_cpu else MIN_HOST_BYTES) if self._min_host_bytes is None else self._min_host_bytes

        def at_rest(sharding: NamedSharding, leaf: Any) -> NamedSharding:
            is_small = leaf.size * leaf.dtype.itemsize < limit
            return sharding if is_small else sharding.with_memory_kind(memory_kind)

        return placed.replace(**{name: jax.tree.map(at_rest, getattr(placed, name), getattr(state, name))
                                 for name in ("params", "model_state", "opt_state")})

    def _device_shardings(self, state: TrainState) -> TrainState:
        layouts = self.layouts(state)
        of_optimizer = layouts_of_optimizer(state, layouts)
        return super().state_shardings(state).replace(
            params=self._shardings(self._rule.axes_at_rest(state.params, layouts), layouts),
            opt_state=self._shardings(self._rule.axes(state.opt_state, of_optimizer), of_optimizer))

    def on_devices(self, state: TrainState) -> TrainState:
        if self._memory_kind is None:
            return state

        def on_device(leaf: Any, at_rest: NamedSharding, placed: NamedSharding) -> Any:
            return leaf if at_rest == placed else jax.device_put(leaf, placed)

        return jax.tree.map(on_device, state, self.state_shardings(state), self._device_shardings(state))

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        layouts, mesh_axis = self.layouts(state), self._rule.mesh_axis
        of_optimizer, at_rest = layouts_of_optimizer(state, layouts), self._rule.axes_at_rest(state.params, layouts)
        parts = state.replace(
            params=marked(state.params, at_rest, mesh_axis, layouts),
            opt_state=marked(state.opt_state, self._rule.axes(state.opt_state, of_optimizer), mesh_axis, of_optimizer))
        return parts, specs_of(parts)

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        mesh_axis = self._rule.mesh_axis
        return super().replica_context(rows, row_mask) if mesh_axis is None else ShardedReplicaContext(
            self._rule, mesh_axis, self._inner_axes, self.layouts, *self._context_arguments(rows, row_mask))

    def with_params_in_place(self, state: TrainState) -> TrainState:
        return state.replace(params=self._gathered(state.params, self.layouts(state)))

    def _gathered(self, tree: PyTree, layouts: Layouts) -> Any:
        """Returns parameters or gradients whole over the shards, on meshes that split activations too.

        With parameters and rows over one mesh axis and activations over another, XLA computes wrong products in the
        loop of a recurrent layer (jax 0.10 and 0.12), so that parameters are gathered before it, and gradients split
        after it.
        """
        if self._rule.num_shards == 1 or not self._inner_axes:
            return tree
        return constrained(tree, self._shardings(jax.tree.map(lambda leaf: WHOLE, tree), layouts))

    def with_gradients_in_place(self, grads: PyTree, layouts: Layouts) -> Any:
        return grads if self._rule.mesh_axis is None else constrained(
            self._gathered(grads, layouts), self._shardings(self._rule.axes(grads, layouts), layouts))

    def gradient_shardings(self, state: TrainState) -> Any:
        trained, layouts = state.trainable(state.params), self.layouts(state)
        return self._shardings(self._rule.axes(trained, layouts), layouts)

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        if self._rule.mesh_axis is None:
            return super().from_replicas(before, scattered)
        layouts = self.layouts(before)
        of_optimizer = layouts_of_optimizer(before, layouts)
        parts: dict[str | None, tuple[Any, Any]] = {}
        for name in part_names(before):
            closed, (params, opt_state) = scattered.params[name], part(before, name)
            if closed.values is not None:
                params, opt_state = unmarked(closed.values)
            own, of_own_optimizer = layouts_of_part(layouts, name), layouts_of_part(of_optimizer, name)
            at_rest = self._shardings(self._rule.axes_at_rest(params, own), own)
            if closed.updates:
                # Without this, the compiler keeps them split between steps and gathers them twice in each step.
                params = constrained(params, at_rest)
                # Split even if parameters rest whole, so that each device updates only its shard.
                params = constrained(params, self._shardings(self._rule.axes(params, own), own))
                rule = before.optimizer if name is None else before.optimizer[name]
                for grads, extra in closed.updates:
                    params, opt_state = rule.update(unmarked(grads), opt_state, params, extra)
            of_moments = self._shardings(self._rule.axes(opt_state, of_own_optimizer), of_own_optimizer)
            parts[name] = constrained(params, at_rest), constrained(opt_state, of_moments)
        if None in parts:
            return scattered.replace(params=parts[None][0], opt_state=parts[None][1])
        return scattered.replace(params={name: params for name, (params, _) in parts.items()},
                                 opt_state={name: opt_state for name, (_, opt_state) in parts.items()})


def _check_host_memory(devices: Iterable[jax.Device], memory_kind: str | None) -> None:
    if memory_kind is not None and any(map(is_described, devices)):
        raise ValueError("The state would rest in the memory of the host, and described devices have no host. Plan "
                         "`FullyShardedStrategy()`, which splits the state over the devices.")


class FullyShardedStrategy(ShardedStrategy):
    """Synchronous training with parameters and optimizer state split over the devices, for states larger than a device.

    In each step a device gathers each parameter where the step uses it, in the forward and again in the backward pass,
    computes gradients on its rows, and keeps its shard of their mean. The update runs on the shards. A device therefore
    holds a few whole parameters at a time, and never the whole optimizer state. If a single layer is too big, use
    `ModelParallelStrategy`. In a partitioned step (docs/strategies.md) XLA places the gathers. Results are the same as
    on one device for any optax transformation, including transformations of whole gradients, such as clipping by the
    global norm, LAMB and Adafactor. An array is split along its longest axis that is divisible by the number of
    devices. An array without such an axis stays whole, which `explain` shows.

    Hybrid sharding, over several hosts: `mesh_shape={"replica": 2, "shard": 8}` splits rows over all 16 devices, and
    the state over 8. Parameters are gathered inside of a host, and an eighth of the gradients' bytes passes between
    hosts.

    Args:
      devices: device names such as "gpu:0", indices into `jax.local_devices()`, or `jax.Device`s. By default all
        devices of the cluster that this process joins, as with `MultiWorkerMirroredStrategy`, or else all local
        devices.
      level: "parameters" splits parameters and optimizer state. "optimizer" splits only the optimizer state, which
        saves the gathering of parameters in each step, at the cost of a whole copy of them on each device.
      min_shard_bytes: smaller arrays stay whole.
      communication_options: as in `MultiWorkerMirroredStrategy`, without `implementation`.
      mesh_shape: sizes of the mesh axes "replica" and "shard", whose product is the number of devices. The state is
        split over "shard" and copied over "replica". Devices are taken in order, "shard" fastest, so that "shard" is
        inside of a host if its size divides the number of devices of a host. None splits the state over all devices.

    Raises:
      ValueError: if a device cannot be used, the level is unknown, a size is negative, options name an algorithm, or
        the mesh has other axes or does not fit the devices.
      TypeError: if `mesh_shape` is not a dict of whole numbers.

    Example:
      >>> strategy = FullyShardedStrategy(["cpu:0"])
      >>> strategy.num_replicas_in_sync
      1
      >>> FullyShardedStrategy(["cpu:0"], mesh_shape={"replica": 1, "shard": 1})
      FullyShardedStrategy({'replica': 1, 'shard': 1})

    Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020). The
    levels are its stages 3 and 1. Hybrid sharding: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded
    Data Parallel" (2023).
    """

    def __init__(
        self, devices: Sequence[Any] | None = None, level: str = "parameters", min_shard_bytes: int = MIN_SHARD_BYTES,
        communication_options: CommunicationOptions | None = None, mesh_shape: Mapping[str, int] | None = None,
    ):
        options = without_implementation(communication_options)
        sizes = None if mesh_shape is None else checked_sizes(mesh_shape, '{"replica": 2, "shard": 4}')
        if sizes is not None and sizes.keys() != {REPLICA_AXIS, SHARD_AXIS}:
            raise ValueError(
                f"`mesh_shape` of FullyShardedStrategy has the axes 'replica' and 'shard'. Received: {dict(sizes)}. "
                "For axes that a layout or a module names, use `ModelParallelStrategy(mesh_shape, layout_map=...)`.")
        found = cluster_devices(options.timeout_seconds) if devices is None else find_devices(devices)
        super().__init__(found if sizes is None else mesh_of(sizes, found),
                         REPLICA_AXIS if sizes is None else SHARD_AXIS, level, min_shard_bytes, options=options)


class CentralStorageStrategy(ShardedStrategy):
    """Synchronous training with the variables in host memory.

    Parameters, model state and optimizer state rest in pinned host memory. Each large array is stored once, in as many
    shards as there are devices. An execution copies them to the devices, and each device updates its shard. Between
    executions the devices hold only small arrays, for which a copy takes longer than it is worth.

    Args:
      compute_devices: the devices that compute, as `devices` of `MirroredStrategy`.
      min_host_bytes: smaller arrays stay on the devices. None means 64 KiB, or 0 if the devices are CPUs.

    Raises:
      ValueError: if a device cannot be used or the size is negative.

    Example:
      >>> strategy = CentralStorageStrategy(["cpu:0"])
      >>> strategy.num_replicas_in_sync
      1

    Source: `tf.distribute.experimental.CentralStorageStrategy`.
    """

    def __init__(self, compute_devices: Sequence[Any] | None = None, min_host_bytes: int | None = None):
        check_count("min_host_bytes", min_host_bytes, 0, optional=True)
        super().__init__(find_devices(compute_devices, "compute_devices"), REPLICA_AXIS, "parameters", MIN_SHARD_BYTES,
                         memory_kind="pinned_host", min_host_bytes=min_host_bytes)
