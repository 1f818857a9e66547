"""The functions of a phase that run a group of batches, step after step.

A step is a function of the whole batch, and has one of two lowerings with the same results. Replicated: each replica
computes its rows, and gradients are averaged before the update. Partitioned: a single-device program that XLA divides.
`lowering.py` decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trainer.core import trace_purity
from trainer.core.compile.jit import compiled
from trainer.core.compile.traces.cpu_conv_layout import with_fast_convolutions
from trainer.core.compile.traces.late_gathers import with_late_gathers
from trainer.core.compile.traces.passed_through import first_passed_through
from trainer.core.compile.traces.row_bits import UnlikeDraws, with_bits_of_rows
from trainer.core.compile.traces.undivided import with_undivided_axes
from trainer.core.replica_context import ReplicaContext, single_context
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.distribute import Strategy
from trainer.distribute.replica.partitioned import PartitionedContext
from trainer.distribute.replica.replicated_state import finalize_skipped_updates, run_on_replicas
from trainer.engine.step import steps
from trainer.engine.step.lowering import Lowerings, WhyNotReplicated

_ONE_BATCH: dict[str, Callable[..., Any]] = {
    "train": steps.train_one_batch, "test": steps.test_one_batch, "predict": steps.predict_one_batch}
_GROUP: dict[str, Callable[..., Any]] = {
    "train": steps.train_group, "test": steps.test_group, "predict": steps.predict_group}

MAX_PROGRAMS = 64  # of a phase: those last used


class StepFunctions:
    """The functions that run groups of batches of a phase, traced over a strategy's mesh.

    Args:
      user_step: the model's `train_step`, `test_step` or `predict_step`.
      strategy: the mesh, the placement and the reduction.
      eager: whether steps run operation by operation.
      why_not_replicated: returns the reason why a step cannot be replicated; None if nothing can be proved.

    Attributes:
      constants: the values that the step has read from other models.
      state_shapes: the shapes of the state, with its shardings, after `set_state_shapes`.
      function: `_function`, with its `MAX_PROGRAMS` last used results kept.
    """

    def __init__(self, kind: str, user_step: steps.Step, strategy: Strategy, eager: bool,
                 why_not_replicated: WhyNotReplicated | None):
        self._kind, self._strategy, self._eager = kind, strategy, eager
        self._lowerings = Lowerings(kind, strategy, why_not_replicated)
        self.constants = trace_purity.Constants()
        one_batch = functools.partial(self._noting_constants, _ONE_BATCH[kind], user_step)
        self._eager_step = functools.partial(_ONE_BATCH[kind], user_step, single_context)
        # The two lowerings of `train_one_batch`, `test_one_batch` or `predict_one_batch`; `_one_batch` chooses one.
        # Compiled separately so that all functions built on them share their traces, the costly part.
        self._whole_batch = self._shared(
            functools.partial(one_batch, functools.partial(PartitionedContext, strategy)),
            *[functools.partial(with_undivided_axes, mesh=strategy.mesh)] * (strategy.mesh.size > 1))
        self._of_replica = self._shared(
            functools.partial(one_batch, self._replica_context),
            functools.partial(with_bits_of_rows, axis_name=strategy.row_axes),
            *[with_late_gathers] * strategy.gathers_late)
        self.state_shapes: Any = None
        self._state_shardings: Any = None
        self._unchanged_leaves: list[bool] | None = None  # leaves of an offloaded state that need not be sent back
        self.function = functools.lru_cache(MAX_PROGRAMS)(self._function)

    def set_state_shapes(self, state: TrainState) -> None:
        """Records the shapes of the state, from the state or its shapes."""
        def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            weak_type = getattr(leaf, "weak_type", False)  # random keys have no weak type
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)

        if self.state_shapes is None:
            self._state_shardings = self._strategy.state_shardings(state)
            self.state_shapes = jax.tree.map(placed, state, self._state_shardings)

    def why_partitioned(self, batch: PyTree) -> str | None:
        """Returns the reason why a step on a batch of such shapes is partitioned; None if it is replicated."""
        return self._lowerings.why_partitioned(self.state_shapes, batch)

    def one_step(self, rows: int, state: TrainState, stack: PyTree) -> Any:
        """Returns the results of a step on the first batch of a stack; `traced_step` traces it."""
        return self._one_batch(rows, self._on_devices(state), jax.tree.map(lambda leaf: leaf[0], stack))

    def traced_step(self, rows: int, stack: PyTree) -> Any:
        """Returns the same step as a `jax.stages.Traced`."""
        # The same shapes as in `function`, so that it is not traced again.
        traced = compiled(functools.partial(self.one_step, rows)).trace(self.state_shapes, stack)
        if self._strategy.offloads_state and self._kind == "train" and self._unchanged_leaves is None:
            self._unchanged_leaves = first_passed_through(traced.jaxpr, len(jax.tree.leaves(self.state_shapes)))
        return traced

    def _function(self, rows: int, fused: bool, count: int | None) -> Any:
        """Returns the function that runs groups of batches, compiled unless it is eager.

        Args:
          rows: number of rows of each batch.
          fused: whether a group has several batches.
          count: number of steps, if it is a constant of the program.
        """
        one_batch = functools.partial(self._one_batch, rows)
        run = functools.partial(_GROUP[self._kind], one_batch, fused, count=count)
        return self._eager_function(run) if self._eager else self._compiled_function(run)

    def _compiled_function(self, run: Callable[..., Any]) -> Any:
        strategy = self._strategy
        out_shardings = {"train": (self._state_shardings, strategy.logs_sharding), "test": strategy.logs_sharding,
                         "predict": strategy.outputs_sharding}
        # Running logs are not donated: a callback may read the logs of an earlier step later.
        return compiled(functools.partial(self._execution, run), out_shardings[self._kind],
                        donate=(0,) if self._kind == "train" else ())

    def _eager_function(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def execute(*arguments: Any) -> Any:
            returned = self._execution(run, *arguments)
            return (jax.device_put(returned[0], self._state_shardings), *returned[1:]) if self._kind == "train" else (
                returned)

        return execute

    def _execution(self, run: Callable[..., Any], state: TrainState, *rest: Any) -> Any:
        returned = run(self._on_devices(state), *rest)
        if self._unchanged_leaves is None:
            return returned
        after, structure = jax.tree.flatten(returned[0])
        leaves = zip(jax.tree.leaves(state), after, self._unchanged_leaves, strict=True)
        return (jax.tree.unflatten(structure, [old if is_kept else new for old, new, is_kept in leaves]), *returned[1:])

    def _on_devices(self, state: TrainState) -> Any:
        state = self._strategy.on_devices(state)
        return state if self._kind == "train" else state.averaged()

    # --- one step --------------------------------------------------------------------------------------------------

    def _one_batch(self, rows: int, state: TrainState, batch: PyTree) -> Any:
        """Returns the results of a batch, of which the first `rows` rows are real."""
        placed_rows = steps.rows_of(batch)
        if rows != placed_rows:
            batch = jax.tree.map(lambda leaf: leaf[:rows], batch)
        if not self._eager and self.why_partitioned(batch) is None:
            try:
                return self._on_replicas(state, batch)
            except UnlikeDraws as error:
                self._lowerings.partition(batch, str(error))
            except Exception as error:  # the whole batch raises it too, with its own shapes, or avoids it
                self._lowerings.partition(
                    batch, f"it cannot be traced on the rows of a replica ({type(error).__name__})")
        if self._eager:  # XLA would also divide operations that it must not divide
            returned = self._eager_step(*jax.device_put((state, batch), self._strategy.logs_sharding))
        else:
            batch = self._strategy.with_rows_in_place(batch)
            with self._strategy.tracing_whole_batch():
                returned = self._whole_batch(state, batch)
        if self._kind == "predict" and rows != placed_rows:  # arrays outside of a program have equal shards
            returned = jax.tree.map(
                lambda leaf: jnp.pad(leaf, [(0, placed_rows - rows), *[(0, 0)] * (leaf.ndim - 1)]), returned)
        if self._kind != "train":
            return returned
        after = finalize_skipped_updates(state, returned[0])
        if not self._eager:
            after = self._strategy.with_state_in_place(after)
        return _finished(state, after, *returned[1:])

    def _on_replicas(self, state: TrainState, batch: PyTree) -> Any:
        """Returns the results of a batch whose rows are computed by the replicas."""
        strategy, is_train = self._strategy, self._kind == "train"

        def one_replica(state: Any, batch: Any) -> tuple[Any, ...]:
            returned = self._of_replica(state, batch)
            return ([(0, returned[0])], returned[1:]) if is_train else ([], returned)

        out_spec = strategy.rows_spec if self._kind == "predict" else PartitionSpec()
        states, (outputs,) = run_on_replicas(
            strategy, one_replica, state, (batch,), (strategy.rows_spec,), (out_spec,))
        return _finished(state, states[0], *outputs) if is_train else outputs

    def _replica_context(self, rows: int) -> ReplicaContext:
        context = self._strategy.replica_context(rows, None)
        context.keys_differ = False
        return context

    def _shared(
        self, one_batch: Callable[..., Any], *rewrites: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[..., Any]:
        shared = compiled(one_batch)
        for rewrite in (*rewrites, *[with_fast_convolutions] * self._strategy.is_on_cpu):
            shared = compiled(rewrite(shared))
        return shared

    def _noting_constants(self, one_batch: Callable[..., Any], *arguments: Any) -> Any:
        with trace_purity.noting(self.constants):
            return one_batch(*arguments)


def _finished(before: Any, after: Any, step_logs: Any, rows: Any) -> Any:
    return after, steps.with_logs_of_updates(before, after, step_logs), rows
