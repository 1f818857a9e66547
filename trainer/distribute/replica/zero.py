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
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from trainer.core.identity import Identity
from trainer.core.replica_context import ReduceOp
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import REPLICA_AXIS
from trainer.distribute.replica import collectives
from trainer.distribute.replica.collectives import MeshReplicaContext

WHOLE = -1  # the axis of a leaf that is not split


class ShardingRule(NamedTuple):
    """Choice of the axis of an array that is split over the replicas.

    Attributes:
      num_replicas: number of replicas.
      min_bytes: smaller arrays stay whole, because gathering them costs more than their memory.
      shards_params: whether parameters are split as well, or only the state of the optimizer.
    """

    num_replicas: int
    min_bytes: int
    shards_params: bool

    def axis(self, leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> int:
        """Returns the longest axis divisible by the number of replicas, the first of several; or `WHOLE`."""
        if leaf.size * leaf.dtype.itemsize < self.min_bytes:
            return WHOLE
        dividing = [axis for axis, size in enumerate(leaf.shape) if size and size % self.num_replicas == 0]
        return max(dividing, key=lambda axis: leaf.shape[axis], default=WHOLE)

    def axes(self, tree: PyTree) -> Any:
        """Returns the split axis of each leaf of a tree."""
        return jax.tree.map(self.axis, tree)

    def axes_at_rest(self, params: PyTree) -> Any:
        """Returns the split axis of each parameter between steps."""
        return self.axes(params) if self.shards_params else jax.tree.map(lambda leaf: WHOLE, params)


def spec_of(axis: int) -> PartitionSpec:
    """Returns the partition spec of an array that is split along `axis`."""
    return PartitionSpec() if axis == WHOLE else PartitionSpec(*[None] * axis, REPLICA_AXIS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """An array that is split over the replicas along `axis`; within a replica, its shard."""

    value: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})


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
    """The context of a replica of a strategy that splits the state over the replicas by `rule`."""

    def __init__(self, rule: ShardingRule, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rule = rule
        self._updates: list[_Update] = []

    def gather_params(self, state: TrainState) -> TrainState:
        return state.replace(params=self._gathered(state.params))

    def _gathered(self, tree: PyTree) -> Any:
        return collectives.gather_shards(unmarked(tree), _axes_of(tree), self.axis_name)

    def _taken(self, tree: PyTree) -> Any:
        axes = self._rule.axes(tree)
        return marked(collectives.take_shards(tree, axes, self.axis_name, self.num_replicas_in_sync), axes)

    def reduce_gradients(self, reduce_op: ReduceOp | str | None, grads: PyTree) -> Any:
        if reduce_op is None:
            return self._taken(grads)
        axes = self._rule.axes(grads)
        return marked(collectives.reduce_to_shards(
            reduce_op, grads, axes, self.axis_name, self.num_replicas_in_sync, self.packs), axes)

    def update(
        self, rule: Any, grads: PyTree, opt_state: PyTree, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        # A function of the loss needs the rows, which are missing outside of the replicas.
        extra = {name: extra[name] for name in extra if name == "value"}
        whole_params, whole_opt_state = rule.update(self._gathered(grads), self._gathered(opt_state), params, extra)
        result = whole_params, self._taken(whole_opt_state)
        self._updates.append(_Update(grads, extra, _identities((params, opt_state)), _identities(result)))
        return result

    def scatter_updates(self, before: TrainState, after: TrainState) -> TrainState:
        closed = {name: self._closed(part(before, name), part(after, name)) for name in part_names(before)}
        return after.replace(params=closed, opt_state=None)

    def _closed(self, before: tuple[Any, Any], after: tuple[Any, Any]) -> Closed:
        """Returns the updates that lead from `before` to `after`, or the values if something else happened."""
        start, reached, updates = _identities(before), _identities(after), []
        for update in reversed(self._updates):
            if reached != start and update.after == reached:
                updates.append((update.grads, update.extra))
                reached = update.before
        if reached == start:
            return Closed(tuple(reversed(updates)), None)
        params, opt_state = after
        return Closed((), (self._taken(params), opt_state))


def part_names(state: TrainState) -> tuple[str | None, ...]:
    """Returns the names of the parts of a state that have their own optimizers; `(None,)` for a single optimizer."""
    return tuple(state.params) if isinstance(state.optimizer, Mapping) else (None,)


def part(state: TrainState, name: str | None) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state of a part."""
    return (state.params, state.opt_state) if name is None else (state.params[name], state.opt_state[name])


def marked(tree: PyTree, axes: Any) -> Any:
    """Returns a tree in which each split leaf is a `Shard`."""
    return jax.tree.map(lambda leaf, axis: leaf if axis == WHOLE else Shard(leaf, axis), tree, axes)


def unmarked(tree: PyTree) -> Any:
    """Returns a tree with plain arrays in place of its `Shard`s."""
    return jax.tree.map(lambda leaf: leaf.value if is_shard(leaf) else leaf, tree, is_leaf=is_shard)


def specs_of(tree: PyTree) -> Any:
    """Returns the partition spec of each leaf, for a tree in which split leaves are `Shard`s."""
    return jax.tree.map(spec_of, _axes_of(tree))


def _axes_of(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: leaf.axis if is_shard(leaf) else WHOLE, tree, is_leaf=is_shard)


def is_shard(leaf: object) -> bool:
    """Returns whether `leaf` is a `Shard`."""
    return isinstance(leaf, Shard)


def _identities(tree: PyTree) -> tuple[Any, ...]:
    """Returns the arrays of a tree to compare by identity, which finds the updates between two states."""
    return tuple(map(Identity, jax.tree.leaves(tree)))
