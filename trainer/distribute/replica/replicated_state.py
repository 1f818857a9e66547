"""The state of training in a step over replicas: the one contract between a strategy and the steps that it runs.

An execution, of `fit` as of `strategy.run`, takes a state along this way; a strategy says what each stop does, and
with whole copies on each device all of them are trivial:

    on_devices -> to_replica -> [gather_params -> the step -> scatter_updates] -> from_replicas
    `- once an execution -'     `- on each replica: `ReplicaContext` ---------'

Owns that order, and the one rule that combines model state that replicas have changed. What a step
computes is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from trainer.core.precision import where_finite
from trainer.core.replica_context import AllRows, ReplicaContext, RowMask, WholeBatchContext
from trainer.core.train_state import TrainState, check_same_structure
from trainer.core.tree_paths import restricted
from trainer.distribute.replica.zero import specs_of

Tree = TypeVar("Tree")
Mean = Callable[[list[jax.Array]], Sequence[jax.Array]]


class StateStrategy(Protocol):
    """What a strategy does with the state of training, and how it runs a function on its replicas."""

    mesh: Mesh

    @property
    def rows_spec(self) -> PartitionSpec:
        """How arrays whose first axis is rows, or replicas, are split."""

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns where each leaf of a state lives between executions."""

    def on_devices(self, state: TrainState) -> TrainState:
        """Returns a state in the memory of the devices; part of a compiled execution, before its first step."""

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        """Returns what each replica of a step receives for a state, and how that is split over them."""

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        """Returns the state after a step, from the state before it and what `scatter_updates` returned."""

    def map_over_replicas(self, function: Callable[..., Any], in_specs: Any, out_specs: Callable[[Any], Any]) -> Any:
        """Returns a function that runs `function` once on each replica."""

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the replica being traced."""


def context_of(strategy: StateStrategy, rows: int, mask: RowMask) -> ReplicaContext:
    """Returns the context of the replica being traced, for a batch of which it has so many rows.

    Args:
      strategy: the strategy.
      rows: see above.
      mask: float32 of shape `(rows,)`, 0.0 for padding; None for a batch without any, `AllRows` if it is not split.
    """
    if isinstance(mask, AllRows):
        return WholeBatchContext(rows, strategy.replica_context(rows, None))
    return strategy.replica_context(rows, mask)


def is_state(value: object) -> bool:
    """Returns whether a value is a `TrainState`."""
    return isinstance(value, TrainState)


def map_states(function: Callable[[TrainState], TrainState], tree: Tree) -> Tree:
    """Returns a tree with `function(state)` in place of each `TrainState`."""
    return jax.tree.map(lambda leaf: function(leaf) if is_state(leaf) else leaf, tree, is_leaf=is_state)


def run_on_replicas(
    strategy: StateStrategy, one_replica: Callable[..., Any], mirrored: Any, args: Sequence[Any],
    arg_specs: Sequence[Any], out_specs: Sequence[Any],
) -> tuple[list[TrainState], tuple[Any, ...]]:
    """Runs a function once on each replica; part of a compiled execution.

    Args:
      strategy: the mesh and what it does with a state.
      one_replica: given `mirrored` with the states as replicas receive them, and the replica's part of `args`, returns
        `(states, *outputs)`. `states` has `(n, state)` for each state that leaves the replica: it was made of the
        n-th leaf of `mirrored`, and `leave_replica` returned it.
      mirrored: a tree of states and arrays that are equal on all replicas. States are in the devices' memory.
      args: what else the function takes.
      arg_specs: how each of `args` is split over the replicas.
      out_specs: how each of `outputs` is put together.

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
    context: ReplicaContext, function: str, before: TrainState, after: TrainState, mean: Mean | None = None
) -> TrainState:
    """Returns what leaves a replica for the state `after`, which a function made of `before`.

    Args:
      context: the replica's context.
      function: the function's name, for errors.
      before: the state as `gather_params` returned it.
      after: the state that the function returned.
      mean: returns the mean over the replicas of some arrays; by default by a reduction of its own.

    Raises:
      TypeError: if the function changed the structure, shapes or dtypes of the state.
    """
    after = after.replace(model_state=restricted(after.model_state, before.model_state))
    check_same_structure(function, before, after)
    old, treedef = jax.tree.flatten(before.model_state)
    new = merged_model_state(old, jax.tree.leaves(after.model_state), mean or mean_over(context))
    return context.scatter_updates(before, after.replace(model_state=jax.tree.unflatten(treedef, new)))


def merged_model_state(before: Sequence[jax.Array], after: Sequence[jax.Array], mean: Mean) -> list[jax.Array]:
    """Returns model state that is equal on all replicas: the rule for BatchNorm's running averages and all else.

    Floating-point arrays that the step has changed become their mean over the replicas. Arrays that it has left alone
    keep their bits; others, such as counts, are those of the replica.

    Args:
      before: the arrays before the step.
      after: the arrays after it on this replica.
      mean: returns the mean over the replicas of some arrays.
    """
    changed = [index for index, (old, new) in enumerate(zip(before, after, strict=True))
               if new is not old and jnp.issubdtype(jnp.result_type(new), jnp.inexact)]
    merged = list(after)
    for index, value in zip(changed, mean([after[index] for index in changed]), strict=True):
        merged[index] = value.astype(jnp.result_type(after[index]))
    return merged


def mean_over(context: ReplicaContext) -> Mean:
    """Returns a function that takes the mean of arrays over the replicas of a context."""
    share = 1.0 / context.num_replicas_in_sync
    return lambda leaves: context.sum([leaf * share for leaf in leaves])


def finalize_skipped_updates(before: TrainState, after: TrainState) -> TrainState:
    """Returns a state once its updates are made: where an update was skipped, its model state stays as it was.

    All optimizers then have the same loss scale.
    """
    after = after.with_one_loss_scale()
    if before.skipped_updates is None or after.skipped_updates is None:
        return after
    is_made = after.skipped_updates.total == before.skipped_updates.total
    return after.replace(model_state=where_finite(is_made, after.model_state, before.model_state))
