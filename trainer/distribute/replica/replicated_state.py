"""The state of training in a step over replicas: the one contract between a strategy and the steps that it runs.

An execution, of `fit` as of `strategy.run`, takes a state along this way; a strategy says what each stop does, and
with whole copies on each device all of them are trivial:

    on_devices -> to_replica -> [gather_params -> the step -> scatter_updates] -> from_replicas
    `- once an execution -'     `- on each replica: `ReplicaContext` ---------'

Owns that order. What a step computes is not known here, and what becomes of model state that replicas have changed
stands in `state_reduction.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

from trainer.compile.compiler_options import CompilerOptions
from trainer.core.precision import where_finite
from trainer.core.replica_context import ReplicaContext
from trainer.core.train_state import TrainState, check_same_structure
from trainer.core.tree_paths import restricted
from trainer.core.types import PyTree
from trainer.distribute.replica.state_reduction import SumOverReplicas, over_replicas
from trainer.distribute.replica.zero import specs_of

Tree = TypeVar("Tree")


class StateStrategy(Protocol):
    """What a strategy does with the state of training, and how it runs a function on its replicas."""

    mesh: Mesh

    @property
    def rows_spec(self) -> PartitionSpec:
        """How arrays whose first axis is rows, or replicas, are split."""

    def compiler_options(self) -> CompilerOptions:
        """Returns the XLA options of a program of all replicas."""

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns where each leaf of a state lives between executions."""

    def on_devices(self, state: TrainState) -> TrainState:
        """Returns a state in the memory of the devices; part of a compiled execution, before its first step."""

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        """Returns what each replica of a step receives for a state, and how that is split over them."""

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        """Returns the state after a step, from the state before it and what `scatter_updates` returned."""

    def with_rows_in_place(self, tree: PyTree) -> Any:
        """Returns arrays of rows of the whole batch, where they are computed with; part of a compiled execution."""

    def with_gradients_in_place(self, grads: PyTree) -> Any:
        """Returns gradients of the whole batch, split as the update needs them; part of a compiled execution."""

    def map_over_replicas(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Callable[[Any], Any],
        divides_replicas: bool = True,
    ) -> Any:
        """Returns a function that runs `function` once on each replica."""

    def scope(self) -> AbstractContextManager[Any]:
        """Makes this the strategy that code in the block gets."""

    def replica_context(self, rows: int | None, row_mask: jax.Array | None) -> ReplicaContext:
        """Returns the context of the replica being traced."""


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
    context: ReplicaContext, function: str, before: TrainState, after: TrainState,
    sum_over_replicas: SumOverReplicas | None = None,
) -> TrainState:
    """Returns what leaves a replica for the state `after`, which a function made of `before`.

    Args:
      context: the replica's context.
      function: the function's name, for errors.
      before: the state as `gather_params` returned it.
      after: the state that the function returned.
      sum_over_replicas: returns the sums of some arrays; by default by a reduction of its own.

    Raises:
      TypeError: if the function changed the structure, shapes or dtypes of the state.
    """
    after = after.replace(model_state=restricted(after.model_state, before.model_state))
    check_same_structure(function, before, after)
    model_state = over_replicas(before.model_state, after.model_state, context, sum_over_replicas)
    return context.scatter_updates(before, after.replace(model_state=model_state))


def finalize_skipped_updates(before: TrainState, after: TrainState) -> TrainState:
    """Returns a state once its updates are made: where an update was skipped, its model state stays as it was.

    All optimizers then have the same loss scale.
    """
    after = after.with_one_loss_scale()
    if before.skipped_updates is None or after.skipped_updates is None:
        return after
    is_made = after.skipped_updates.total == before.skipped_updates.total
    return after.replace(model_state=where_finite(is_made, after.model_state, before.model_state))
