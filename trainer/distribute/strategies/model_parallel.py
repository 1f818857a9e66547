"""Strategy for models whose parameters are split by rules over their own mesh axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core import errors
from trainer.core.arguments import check_count
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import SEPARATOR, named_leaves
from trainer.core.types import PyTree
from trainer.distribute.cluster import cluster_devices
from trainer.distribute.placement.devices import find_devices
from trainer.distribute.placement.placement import REPLICA_AXIS
from trainer.distribute.replica.collectives import NcclAllReduce
from trainer.distribute.replica.communication_options import CommunicationOptions, without_implementation
from trainer.distribute.replica.zero import part, part_names
from trainer.distribute.strategies.layout_map import LayoutMap
from trainer.distribute.strategies.strategy import Strategy


class ModelParallelStrategy(Strategy):
    """Synchronous training on a mesh: data parallel over the axis "replica", parameters split over the other axes.

    Each replica is a group of devices. Its step is one program over these devices: the compiler splits the computation
    like the parameters and adds the communication. Moments and other optimizer state of a parameter are split like the
    parameter.

    Args:
      mesh_shape: sizes of the mesh axes by name, such as `{"replica": 4, "model": 2}`. Without "replica" there is
        one replica.
      devices: one device per place of the mesh, the last axis fastest; as in `FullyShardedStrategy`.
      layout_map: a `LayoutMap`, or a mapping for it: the parameters to split, and their axes. Other parameters are
        whole on each device.
      communication_options: as in `FullyShardedStrategy`.

    Raises:
      ValueError: if a device cannot be used or the mesh does not fit the devices; when a model is built or explained,
        if a rule matches no parameter or does not fit a parameter.
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
        communication_options: CommunicationOptions | None = None,
    ):
        sizes, options = _checked_sizes(mesh_shape), without_implementation(communication_options)
        found = cluster_devices(options.timeout_seconds) if devices is None else find_devices(devices)
        if math.prod(sizes.values()) != len(found):
            raise ValueError(f"`mesh_shape` {dict(mesh_shape)} has {math.prod(sizes.values())} places, but there are "
                             f"{len(found)} devices. Expected: one device for each place.")
        self.layout_map = layout_map if isinstance(layout_map, LayoutMap) else LayoutMap(layout_map)
        mesh = Mesh(np.asarray(found).reshape(tuple(sizes.values())), tuple(sizes))
        super().__init__(mesh, NcclAllReduce(options=options))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.mesh.shape)})"

    def _mesh_over(self, devices: Sequence[jax.Device]) -> Mesh:
        # The size of a replica stays, and the number of replicas follows from the number of devices.
        sizes = {name: size for name, size in self.mesh.shape.items() if name != REPLICA_AXIS}
        replica = math.prod(sizes.values())
        if len(devices) % replica:
            raise ValueError(f"{self!r} has {replica} devices in each replica, which do not divide {len(devices)}. "
                             "Give another `mesh_shape`.")
        shape = {name: sizes.get(name, len(devices) // replica) for name in self.mesh.axis_names}
        return Mesh(np.asarray(devices).reshape(tuple(shape.values())), tuple(shape))

    def state_shardings(self, state: TrainState) -> TrainState:
        specs = self._specs(state)
        opt_states = {}
        for name in part_names(state):
            params, opt_state = part(state, name)
            prefix = "" if name is None else f"{name}{SEPARATOR}"
            known = {path: (leaf.shape, specs[f"{prefix}{path}"]) for path, leaf in named_leaves(params).items()}
            opt_states[name] = self._placed(opt_state, {
                path: _spec_of_moment(path, leaf, known) for path, leaf in named_leaves(opt_state).items()})
        return super().state_shardings(state).replace(
            params=self._placed(state.params, specs),
            opt_state=opt_states.get(None, opt_states))

    def _specs(self, state: TrainState) -> dict[str, PartitionSpec]:
        annotated = dict(state.layouts) if self.mesh.size > 1 else {}  # a mesh of one device may lack their axes
        return self.layout_map.specs(named_leaves(state.params), self.mesh.shape, REPLICA_AXIS, annotated)

    def _placed(self, tree: PyTree, specs: Mapping[str, PartitionSpec]) -> Any:
        shardings = [NamedSharding(self.mesh, spec) for spec in specs.values()]
        return jax.tree.unflatten(jax.tree.structure(tree), shardings)

    def gradient_shardings(self, state: TrainState) -> Any:
        specs = self._specs(state)
        trained = state.trainable(state.params)
        return self._placed(trained, {path: specs[path] for path in named_leaves(trained)})

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        # Without this, the compiler may choose another layout for the state between two steps of an execution.
        return jax.lax.with_sharding_constraint(scattered, self.state_shardings(scattered))


def _checked_sizes(mesh_shape: object) -> dict[str, int]:
    if not isinstance(mesh_shape, Mapping):
        raise errors.wrong_type("mesh_shape", mesh_shape, 'a dict such as {"replica": 4, "model": 2}')
    for name, size in mesh_shape.items():
        if not isinstance(name, str):
            raise errors.wrong_type("mesh_shape", name, "a dict whose keys are the names of axes")
        check_count(f"mesh_shape[{name!r}]", size)
    return dict(mesh_shape) if REPLICA_AXIS in mesh_shape else {REPLICA_AXIS: 1, **mesh_shape}


def _spec_of_moment(path: str, leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct,
                    known: Mapping[str, tuple[Any, PartitionSpec]]) -> PartitionSpec:
    """Returns the spec of the parameter at the end of a path in the optimizer's state, if the shapes are equal."""
    segments = path.split(SEPARATOR)
    for start in range(len(segments)):
        shape, spec = known.get(SEPARATOR.join(segments[start:]), (None, None))
        if spec is not None and shape == leaf.shape:
            return spec
    return PartitionSpec()
