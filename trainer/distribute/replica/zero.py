"""State that is split over the replicas: its gathering in a replica, and its update in shards.

A replica gathers the parameters, and its gradients leave it reduced and split. The update is made outside of the
replicas, on arrays that the compiler knows to be split. It is therefore exact for any optax transformation, including
transformations of whole gradients, such as clipping by the global norm, and no device ever holds a whole optimizer
state (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020).

A step that reads parameters after their update, such as a GAN's step, gets them: the replica then gathers the
optimizer's state and makes the update on whole arrays. If nothing reads the result, the compiler drops this work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from trainer.core.compile.jit import on_each_part
from trainer.core.identity import Identity
from trainer.core.replica_context import ReduceOp
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import SEPARATOR, named_leaves, path_name
from trainer.core.types import PyTree
from trainer.distribute.replica import collectives
from trainer.distribute.replica.collectives import MeshReplicaContext

WHOLE = -1  # the axis of a leaf that is not split
NO_LAYOUT = PartitionSpec()


class ShardingRule(NamedTuple):
    """Choice of the axis of an array that is split over a mesh axis of the replicas, by its shape.

    Attributes:
      num_shards: the size of the mesh axis.
      min_bytes: smaller arrays stay whole, because gathering them costs more than their memory.
      shards_params: whether parameters are split as well, or only the state of the optimizer.
      mesh_axis: the name of the mesh axis; None if nothing is split by its shape.
    """

    num_shards: int
    min_bytes: int
    shards_params: bool
    mesh_axis: str | None

    def axis(
        self, leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct, layout: PartitionSpec = NO_LAYOUT
    ) -> int:
        """Returns the longest axis divisible by the number of shards, the first of several; or `WHOLE`.

        Args:
          leaf: the whole array.
          layout: its split over other mesh axes. Axes that it splits are left to it.
        """
        if self.mesh_axis is None or leaf.size * leaf.dtype.itemsize < self.min_bytes:
            return WHOLE
        taken = [axis for axis, entry in enumerate(layout) if entry]
        dividing = [axis for axis, size in enumerate(leaf.shape)
                    if size and size % self.num_shards == 0 and axis not in taken]
        return max(dividing, key=lambda axis: leaf.shape[axis], default=WHOLE)

    def axes(self, tree: PyTree, layouts: Mapping[str, PartitionSpec]) -> Any:
        """Returns the split axis of each leaf of a tree, some of which have layouts by their paths."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self.axis(leaf, layout_at(layouts, path)), tree)

    def axes_at_rest(self, params: PyTree, layouts: Mapping[str, PartitionSpec]) -> Any:
        """Returns the split axis of each parameter between steps."""
        return self.axes(params, layouts) if self.shards_params else jax.tree.map(lambda leaf: WHOLE, params)

    def spec(self, axis: int, layout: PartitionSpec = NO_LAYOUT) -> PartitionSpec:
        """Returns the partition spec of an array with a layout that is also split along `axis`."""
        if axis == WHOLE:
            return layout
        entries = [*layout, *[None] * (axis + 1 - len(layout))]
        return PartitionSpec(*entries[:axis], self.mesh_axis, *entries[axis + 1:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """An array that is split over a mesh axis of the replicas along `axis`; within a replica, its shard.

    The devices of a replica split it by `layout`.
    """

    value: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})
    mesh_axis: str = dataclasses.field(metadata={"static": True})
    layout: PartitionSpec = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Closed:
    """A part of a state as it leaves a replica: either new values, or the updates that lead to them.

    Attributes:
      updates: `(gradients, {"value": loss})` for each update in order; the gradients are reduced, a tree with `Shard`s.
      values: `(params, opt_state)`, with `Shard`s; None if the updates suffice.
    """

    updates: tuple[tuple[Any, dict[str, Any]], ...]
    values: Any


class _Update(NamedTuple):
    grads: PyTree
    extra: dict[str, Any]
    before: tuple[Any, ...]
    after: tuple[Any, ...]


class ShardedReplicaContext(MeshReplicaContext):
    """The context of a replica of a strategy that splits the state over the replicas.

    Args:
      rule: the choice of axes.
      mesh_axis: the mesh axis of the rule.
      inner_axes: the mesh axes of the devices of a replica.
      layouts_of: returns the layouts of the parameters of a state by their paths.
      *args: arguments of `MeshReplicaContext`.
    """

    def __init__(
        self, rule: ShardingRule, mesh_axis: str, inner_axes: Sequence[str],
        layouts_of: Callable[[TrainState], Mapping[str, PartitionSpec]], *args: Any,
    ):
        super().__init__(*args)
        self._rule, self._mesh_axis, self._inner_axes = rule, mesh_axis, inner_axes
        self._layouts_of = layouts_of
        self._layouts: Mapping[str, PartitionSpec] = {}
        self._updates: list[_Update] = []

    def gather_params(self, state: TrainState) -> TrainState:
        # Each on its own, for `core/compile/traces/late_gathers.py`.
        gathered = state.replace(params=jax.tree.map(self._gathered, state.params, is_leaf=is_shard))
        self._layouts = self._layouts_of(gathered)
        return gathered

    def _gathered(self, tree: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_shard)
        shards = {place: leaf for place, leaf in enumerate(leaves) if is_shard(leaf)}
        if not shards:
            return tree
        axes, values = ([getattr(shard, name) for shard in shards.values()] for name in ("axis", "value"))
        whole = self._on_each_part(lambda arrays: collectives.gather_shards(arrays, axes, self._mesh_axis), values,
                                   [shard.layout for shard in shards.values()])
        for place, array in zip(shards, whole, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(structure, leaves)

    def _on_each_part(self, function: Callable[[Any], Any], arrays: Any, layouts: Any) -> Any:
        """Returns the result of collectives on arrays, which stay split over the devices of a replica by layouts."""
        return on_each_part(function, self._inner_axes, layouts)(arrays) if self._inner_axes else function(arrays)

    def _taken(self, tree: PyTree, like: PyTree) -> Any:
        """Returns a tree of `Shard`s and whole arrays, split like another, from a tree of whole arrays."""
        parts = collectives.take_shards(tree, _axes_of(like), self._mesh_axis, self._rule.num_shards)
        return jax.tree.map(lambda shard, leaf: dataclasses.replace(shard, value=leaf) if is_shard(shard) else leaf,
                            like, parts, is_leaf=is_shard)

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        axes, layouts = self._rule.axes(grads, self._layouts), self._layouts
        like = marked(grads, axes, self._mesh_axis, layouts)
        if reduce_op is None:
            return self._taken(grads, like)
        names = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        others = [name for name in names if name != self._mesh_axis]
        specs = jax.tree_util.tree_map_with_path(lambda path, leaf: layout_at(layouts, path), grads)
        return marked(self._on_each_part(lambda grads: collectives.reduce_to_shards(
            reduce_op, grads, axes, self._mesh_axis, self._rule.num_shards, self.packs, others), grads, specs),
            axes, self._mesh_axis, layouts)

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        # A function of the loss needs the rows, which are missing outside of the replicas.
        extra = {name: extra[name] for name in extra if name == "value"}
        whole_params, whole_opt_state = rule.update(self._gathered(grads), self._gathered(opt_state), params, extra)
        result = whole_params, self._taken(whole_opt_state, opt_state)
        self._updates.append(_Update(grads, extra, _identities((params, opt_state)), _identities(result)))
        return result

    def scatter_updates(self, before: TrainState, after: TrainState) -> TrainState:
        closed = {name: self._closed(name, part(before, name), part(after, name)) for name in part_names(before)}
        return after.replace(params=closed, opt_state=None)

    def _closed(self, name: str | None, before: tuple[Any, Any], after: tuple[Any, Any]) -> Closed:
        """Returns the updates that lead from `before` to `after`, or the values if something else happened."""
        start, reached, updates = _identities(before), _identities(after), []
        for update in reversed(self._updates):
            if reached != start and update.after == reached:
                updates.append((update.grads, update.extra))
                reached = update.before
        if reached == start:
            return Closed(tuple(reversed(updates)), None)
        params, opt_state = after
        layouts = layouts_of_part(self._layouts, name)
        like = marked(params, self._rule.axes(params, layouts), self._mesh_axis, layouts)
        return Closed((), (self._taken(params, like), opt_state))


def part_names(state: TrainState) -> tuple[str | None, ...]:
    """Returns the names of the parts of a state that have their own optimizers; `(None,)` for a single optimizer."""
    return tuple(state.params) if isinstance(state.optimizer, Mapping) else (None,)


def part(state: TrainState, name: str | None) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state of a part."""
    return (state.params, state.opt_state) if name is None else (state.params[name], state.opt_state[name])


def layouts_of_part(layouts: Mapping[str, PartitionSpec], name: str | None) -> Mapping[str, PartitionSpec]:
    """Returns the layouts of a part's parameters by their paths in the part."""
    prefix = _prefix(name)
    return {path[len(prefix):]: layout for path, layout in layouts.items() if path.startswith(prefix)}


def layouts_of_optimizer(state: TrainState, layouts: Mapping[str, PartitionSpec]) -> Mapping[str, PartitionSpec]:
    """Returns the layouts of the optimizer's state by path: moments are split like their parameters."""
    found: dict[str, PartitionSpec] = {}
    for name in part_names(state) if layouts else ():
        params, opt_state = part(state, name)
        of_params = layouts_of_part(layouts, name)
        known = {path: (leaf.shape, of_params[path]) for path, leaf in named_leaves(params).items()}
        found |= {f"{_prefix(name)}{path}": _layout_of_moment(path, leaf, known)
                  for path, leaf in named_leaves(opt_state).items()}
    return found


def _layout_of_moment(path: str, leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct,
                      known: Mapping[str, tuple[Any, PartitionSpec]]) -> PartitionSpec:
    """Returns the layout of the parameter at the end of a path in the optimizer's state, if the shapes are equal."""
    segments = path.split(SEPARATOR)
    for start in range(len(segments)):
        shape, layout = known.get(SEPARATOR.join(segments[start:]), (None, None))
        if layout is not None and shape == leaf.shape:
            return layout
    return NO_LAYOUT


def _prefix(name: str | None) -> str:
    return "" if name is None else f"{name}{SEPARATOR}"


def layout_at(layouts: Mapping[str, PartitionSpec], path: Sequence[Any]) -> PartitionSpec:
    """Returns the layout of the leaf at a path of `jax.tree_util`."""
    return layouts.get(path_name(path), NO_LAYOUT) if layouts else NO_LAYOUT


def marked(tree: PyTree, axes: Any, mesh_axis: str | None, layouts: Mapping[str, PartitionSpec]) -> Any:
    """Returns a tree in which each leaf that is split over a mesh axis is a `Shard`."""
    def mark(path: Any, leaf: Any, axis: int) -> Any:
        return leaf if axis == WHOLE or mesh_axis is None else Shard(leaf, axis, mesh_axis, layout_at(layouts, path))

    return jax.tree_util.tree_map_with_path(mark, tree, axes)


def unmarked(tree: PyTree) -> Any:
    """Returns a tree with plain arrays in place of its `Shard`s."""
    return jax.tree.map(lambda leaf: leaf.value if is_shard(leaf) else leaf, tree, is_leaf=is_shard)


def specs_of(tree: PyTree) -> Any:
    """Returns the partition spec of each leaf, for a tree in which split leaves are `Shard`s."""
    return jax.tree.map(lambda leaf: PartitionSpec(*[None] * leaf.axis, leaf.mesh_axis) if is_shard(leaf) else (
        PartitionSpec()), tree, is_leaf=is_shard)


def _axes_of(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: leaf.axis if is_shard(leaf) else WHOLE, tree, is_leaf=is_shard)


def is_shard(leaf: object) -> bool:
    """Returns whether `leaf` is a `Shard`."""
    return isinstance(leaf, Shard)


def _identities(tree: PyTree) -> tuple[Any, ...]:
    """Returns the arrays of a tree to compare by identity, which finds the updates between two states."""
    return tuple(map(Identity, jax.tree.leaves(tree)))
