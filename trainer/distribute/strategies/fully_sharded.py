"""Strategies that split the state over the replicas, in device memory or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from trainer.core import errors
from trainer.core.arguments import check_count
from trainer.core.compile.compiler_options import CompilerOptions
from trainer.core.compile.constraints import constrained
from trainer.core.replica_context import ReplicaContext
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.distribute.cluster import cluster_devices
from trainer.distribute.placement.described import is_described
from trainer.distribute.placement.devices import find_devices
from trainer.distribute.replica.collectives import NcclAllReduce
from trainer.distribute.replica.communication_options import CommunicationOptions, without_implementation
from trainer.distribute.replica.zero import (
    ShardedReplicaContext,
    ShardingRule,
    marked,
    part,
    part_names,
    spec_of,
    specs_of,
    unmarked,
)
from trainer.distribute.strategies.strategy import Strategy

LEVELS = ("parameters", "optimizer")
MIN_SHARD_BYTES = 4096
PACKED_GRADIENT_BYTES = 2**25  # of gradients that are reduced together
MIN_HOST_BYTES = 2**16  # transfer time of this size is about the latency of a transfer


class ShardedStrategy(Strategy):
    """A strategy whose state is split over the replicas; base of `FullyShardedStrategy` and `CentralStorageStrategy`.

    Args:
      devices: the devices, one replica each.
      level: "parameters" or "optimizer", as in `FullyShardedStrategy`.
      min_shard_bytes: as in `FullyShardedStrategy`.
      memory_kind: memory of large arrays between executions; None for the default memory of the devices.
      options: `communication_options` of `FullyShardedStrategy`.
      min_host_bytes: smaller arrays stay in device memory; None for the default of `CentralStorageStrategy`.
    """

    def __init__(
        self, devices: Sequence[jax.Device], level: str, min_shard_bytes: int, memory_kind: str | None = None,
        options: CommunicationOptions | None = None,
        min_host_bytes: int | None = None,
    ):
        if level not in LEVELS:
            raise errors.unknown_name("level", str(level), LEVELS)
        check_count("min_shard_bytes", min_shard_bytes, 0)
        _check_host_memory(devices, memory_kind)
        super().__init__(devices, NcclAllReduce(options=options))
        self._rule = ShardingRule(self.num_replicas_in_sync, min_shard_bytes, shards_params=level == "parameters")
        self._memory_kind, self._min_host_bytes = memory_kind, min_host_bytes
        self.offloads_state = memory_kind is not None

    @property
    def gathers_late(self) -> bool:
        return self._rule.shards_params and self.num_replicas_in_sync > 1

    def compiler_options(self, deterministic: bool = False) -> CompilerOptions:
        options = super().compiler_options(deterministic)
        if self.gathers_late and options:
            # Whole gradients wait for the others of a pack. XLA counts the bytes of each device's shard.
            options.setdefault("xla_gpu_reduce_scatter_combine_threshold_bytes",
                               PACKED_GRADIENT_BYTES // self.num_replicas_in_sync)
        return options

    def over(self, devices: Sequence[jax.Device]) -> Strategy:
        _check_host_memory(devices, self._memory_kind)
        made = super().over(devices)
        assert isinstance(made, ShardedStrategy), "of the same kind"
        made._rule = self._rule._replace(num_replicas=made.num_replicas_in_sync)
        return made

    def _shardings(self, axes: Any) -> Any:
        return jax.tree.map(lambda axis: NamedSharding(self.mesh, spec_of(axis)), axes)

    def _constrained(self, tree: PyTree, axes: Any) -> Any:
        return constrained(tree, self._shardings(axes))

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
        return super().state_shardings(state).replace(
            params=self._shardings(self._rule.axes_at_rest(state.params)),
            opt_state=self._shardings(self._rule.axes(state.opt_state)))

    def on_devices(self, state: TrainState) -> TrainState:
        if self._memory_kind is None:
            return state

        def on_device(leaf: Any, at_rest: NamedSharding, placed: NamedSharding) -> Any:
            return leaf if at_rest == placed else jax.device_put(leaf, placed)

        return jax.tree.map(on_device, state, self.state_shardings(state), self._device_shardings(state))

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        parts = state.replace(params=marked(state.params, self._rule.axes_at_rest(state.params)),
                              opt_state=marked(state.opt_state, self._rule.axes(state.opt_state)))
        return parts, specs_of(parts)

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        return ShardedReplicaContext(self._rule, *self._context_arguments(rows, row_mask))

    def with_gradients_in_place(self, grads: PyTree) -> Any:
        return self._constrained(grads, self._rule.axes(grads))

    def gradient_shardings(self, state: TrainState) -> Any:
        return self._shardings(self._rule.axes(state.trainable(state.params)))

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        parts: dict[str | None, tuple[Any, Any]] = {}
        for name in part_names(before):
            closed, (params, opt_state) = scattered.params[name], part(before, name)
            if closed.values is not None:
                params, opt_state = unmarked(closed.values)
            if closed.updates:
                # Without this, the compiler keeps them split between steps and gathers them twice in each step.
                params = self._constrained(params, self._rule.axes_at_rest(params))
                # Split even if parameters rest whole, so that each device updates only its shard.
                params = self._constrained(params, self._rule.axes(params))
                rule = before.optimizer if name is None else before.optimizer[name]
                for grads, extra in closed.updates:
                    params, opt_state = rule.update(unmarked(grads), opt_state, params, extra)
            parts[name] = (self._constrained(params, self._rule.axes_at_rest(params)),
                           self._constrained(opt_state, self._rule.axes(opt_state)))
        if None in parts:
            return scattered.replace(params=parts[None][0], opt_state=parts[None][1])
        return scattered.replace(params={name: params for name, (params, _) in parts.items()},
                                 opt_state={name: opt_state for name, (_, opt_state) in parts.items()})


def _check_host_memory(devices: Sequence[jax.Device], memory_kind: str | None) -> None:
    if memory_kind is not None and is_described(devices[0]):
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

    Args:
      devices: device names such as "gpu:0", indices into `jax.local_devices()`, or `jax.Device`s. By default all
        devices of the cluster that this process joins, as with `MultiWorkerMirroredStrategy`, or else all local
        devices.
      level: "parameters" splits parameters and optimizer state. "optimizer" splits only the optimizer state, which
        saves the gathering of parameters in each step, at the cost of a whole copy of them on each device.
      min_shard_bytes: smaller arrays stay whole.
      communication_options: as in `MultiWorkerMirroredStrategy`, without `implementation`.

    Raises:
      ValueError: if a device cannot be used, the level is unknown, a size is negative, or options name an algorithm.

    Example:
      >>> strategy = FullyShardedStrategy(["cpu:0"])
      >>> strategy.num_replicas_in_sync
      1

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020). The
    levels are its stages 3 and 1.
    """

    def __init__(
        self, devices: Sequence[Any] | None = None, level: str = "parameters", min_shard_bytes: int = MIN_SHARD_BYTES,
        communication_options: CommunicationOptions | None = None,
    ):
        options = without_implementation(communication_options)
        super().__init__(
            cluster_devices(options.timeout_seconds) if devices is None else find_devices(devices), level,
            min_shard_bytes, options=options)


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
        super().__init__(find_devices(compute_devices, "compute_devices"), "parameters", MIN_SHARD_BYTES,
                         memory_kind="pinned_host", min_host_bytes=min_host_bytes)
