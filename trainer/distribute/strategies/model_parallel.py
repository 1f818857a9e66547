"""Strategy for models whose parameters are split by rules over their own mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from trainer.core.compile.traces.named_axes import axes_of_entry, named_axes
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.distribute.cluster import cluster_devices
from trainer.distribute.placement.devices import find_devices
from trainer.distribute.placement.placement import REPLICA_AXIS, SHARD_AXIS
from trainer.distribute.replica.communication_options import CommunicationOptions, without_implementation
from trainer.distribute.strategies.fully_sharded import MIN_SHARD_BYTES, ShardedStrategy
from trainer.distribute.strategies.layout_map import LayoutMap
from trainer.distribute.strategies.mesh_shape import checked_sizes, mesh_of


class ModelParallelStrategy(ShardedStrategy):
    """Synchronous training on a mesh: data parallel over the axis "replica", parameters split over the other axes.

    Each replica is a group of devices. Its step is one program over these devices: the compiler splits the computation
    like the parameters and adds the communication. Moments and other optimizer state of a parameter are split like the
    parameter.

    The axis "shard" works as in `FullyShardedStrategy`: it splits rows, and each array of the state along its longest
    divisible axis that the layout does not split. With `{"replica": 2, "shard": 4, "model": 2}`, rows are split over 8
    replicas of 2 devices, and an array of the state over 4 devices, or over 8 if a rule splits it too.

    An axis that no layout names is for activations: a module names it in `jax.lax.with_sharding_constraint`, such as
    "sequence" for the tokens of a long text.

    Args:
      mesh_shape: sizes of the mesh axes by name, such as `{"replica": 4, "model": 2}`. Without "replica" there is
        one replica.
      devices: one device per place of the mesh, the last axis fastest; as in `FullyShardedStrategy`. With "shard",
        "replica" is the slowest axis wherever it is written, so that "shard" is inside of a host as far as it fits.
      layout_map: a `LayoutMap`, or a mapping for it: the parameters to split, and their axes. Other parameters are
        whole on each device, or split over "shard".
      communication_options: as in `FullyShardedStrategy`.
      min_shard_bytes: smaller arrays are not split over "shard".

    Raises:
      ValueError: if a device cannot be used or the mesh does not fit the devices; when a model is built or explained,
        if a rule matches no parameter or does not fit a parameter; before a step is compiled, if no layout and no
        constraint of the module names an axis.
      TypeError: if an argument has the wrong type.

    Example:
      >>> strategy = ModelParallelStrategy({"replica": 1, "model": 1}, devices=["cpu:0"],
      ...                                  layout_map={"up/kernel": (None, "model")})
      >>> strategy.num_replicas_in_sync
      1

    Source: `keras.distribution.ModelParallel`.
    """

    def __init__(
        self, mesh_shape: Mapping[str, int], devices: Sequence[Any] | None = None,
        layout_map: LayoutMap | Mapping[str, Any] | None = None,
        communication_options: CommunicationOptions | None = None, min_shard_bytes: int = MIN_SHARD_BYTES,
    ):
        sizes = checked_sizes(mesh_shape, '{"replica": 4, "model": 2}')
        options = without_implementation(communication_options)
        found = cluster_devices(options.timeout_seconds) if devices is None else find_devices(devices)
        self.layout_map = layout_map if isinstance(layout_map, LayoutMap) else LayoutMap(layout_map)
        super().__init__(mesh_of(sizes, found), SHARD_AXIS if SHARD_AXIS in sizes else None, "parameters",
                         min_shard_bytes, options=options)

    def layouts(self, state: TrainState) -> dict[str, PartitionSpec]:
        annotated = dict(state.layouts) if self.mesh.size > 1 else {}  # a mesh of one device may lack their axes
        return self.layout_map.specs(named_leaves(state.params), self.mesh.shape, REPLICA_AXIS, annotated)

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        # Without this, the compiler may choose another layout for the state between two steps of an execution.
        after = super().from_replicas(before, scattered)
        return jax.lax.with_sharding_constraint(after, self.state_shardings(after))

    def check_axes(self, state: TrainState, program: Any) -> None:
        split = {axis for layout in self.layouts(state).values() for entry in layout for axis in axes_of_entry(entry)}
        others = [axis for axis in self._inner_axes if axis not in split]
        unused = [axis for axis in others if axis not in (named_axes(program) if others else ())]
        if unused:
            axis, size = unused[0], self.mesh.shape[unused[0]]
            raise ValueError(
                f"`mesh_shape` {dict(self.mesh.shape)} has the axis {axis!r}, of {size} devices, which splits nothing: "
                "no layout and no annotation of a parameter names it, and no sharding constraint of the module. These "
                f"devices would all compute the same. Expected: a rule such as {{'up/kernel': (None, {axis!r})}} in "
                "`layout_map`, a `jax.lax.with_sharding_constraint` in the module, or a mesh without this axis, such "
                f"as {self._without(axis)}.")

    def _without(self, axis: str) -> dict[str, int]:
        sizes = {name: size for name, size in self.mesh.shape.items() if name != axis}
        return {**sizes, REPLICA_AXIS: sizes[REPLICA_AXIS] * self.mesh.shape[axis]}
