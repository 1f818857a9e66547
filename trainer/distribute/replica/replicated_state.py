"""State of training in a step over replicas: the contract between a strategy and the steps that it runs.

An execution of `fit` or `strategy.run` takes a state through these calls. A strategy implements each of them, and with
whole copies on each device all are trivial:

    on_devices -> to_replica -> [gather_params -> the step -> scatter_updates] -> from_replicas
    `- once an execution -'     `- on each replica: `ReplicaContext` ---------'

Owns this order. It must not know the computation of a step. `state_reduction.py` combines model state that replicas
have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

from trainer.core.compile.compiler_options import CompilerOptions
from trainer.core.precision import where_finite
from trainer.core.replica_context import ReplicaContext
from trainer.core.train_state import TrainState, check_is_overwritten, check_same_structure
from trainer.core.tree_paths import restricted
from trainer.core.types import PyTree
from trainer.distribute.replica.state_reduction import SumOverReplicas, over_replicas
from trainer.distribute.replica.zero import specs_of

Tree = TypeVar("Tree")


class StateStrategy(Protocol):
    """Operations of a strategy on the state of training and on its replicas."""

    mesh: Mesh

    @property
    def rows_spec(self) -> PartitionSpec:
        """Partition spec of arrays whose first axis is rows or replicas."""

    def compiler_options(self) -> CompilerOptions:
        """Returns the XLA options of a program of all replicas."""

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns the sharding of each leaf of a state between executions."""

    def on_devices(self, state: TrainState) -> TrainState:
        """Returns a state in device memory; part of a compiled execution, before its first step."""

    def to_replica(self, state: TrainState) -> tuple[TrainState, Any]:
        """Returns the state that each replica of a step receives, and its partition specs over the replicas."""

    def from_replicas(self, before: TrainState, scattered: TrainState) -> TrainState:
        """Returns the state after a step, from the state before it and the result of `scatter_updates`."""

    def with_rows_in_place(self, tree: PyTree) -> Any:
        """Returns arrays of rows of the whole batch, placed for the computation; part of a compiled execution."""

    def with_gradients_in_place(self, grads: PyTree) -> Any:
        """Returns gradients of the whole batch, split as the update needs them; part of a compiled execution."""

    def map_over_replicas(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Callable[[Any], Any],
        divides_replicas: bool = True,
    ) -> Any:
        """Returns a function that runs `function` once on each replica."""

    def scope(self) -> AbstractContextManager[Any]:
        """Makes this the current strategy of the code in the block."""

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
      ValueError: if it trained parameters, but did not overwrite what gradients overwrite.
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
