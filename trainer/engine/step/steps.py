"""The pure steps on a batch, or on a replica's rows of a batch, and on a group of batches.

A group is a stack of several batches of the same shape. The steps know neither devices nor collectives: they reduce
through their replica context. Nothing here compiles; `core/compile/jit.py` does.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trainer.core import errors, replica_context, trace_purity
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.replica_context import ReplicaContext
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.data.resident import batch_at, stack_length
from trainer.distribute.replica.replicated_state import leave_replica
from trainer.engine.step.output_matching import without_rows
from trainer.engine.step.running_logs import RunningLogs, add_step, check_logs, merge_over_replicas
from trainer.engine.step.step_metrics import TracedMetrics, traced_metrics
from trainer.metrics import Metric, Sum
from trainer.metrics.base import MetricValue

Step = Callable[[TrainState, Any], Any]
ContextFactory = Callable[[int], ReplicaContext]


def rows_of(batch: PyTree) -> int:
    """Returns the number of rows of a batch, from its first leaf."""
    return jax.tree.leaves(batch)[0].shape[0]


def train_one_batch(
    train_step: Step, make_context: ContextFactory, state: TrainState, batch: PyTree
) -> tuple[TrainState, dict[str, Any], Any]:
    """Returns a replica's state after a train step, the logs of the whole batch, and the number of its real rows.

    The step count always advances by 1. Logs and model state share a single reduction.

    Raises:
      TypeError: if `train_step` does not return `(logs, state)`, or returns a state of another structure.
    """
    with replica_context.enter(make_context(rows_of(batch))) as context:
        state = context.gather_params(state)
        with trace_purity.side_effects_rejected(train_step), _tracing(train_step) as metrics:
            returned = train_step(state, batch)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], TrainState):
            raise TypeError("`train_step` must return `(logs, state)`, a dict and a TrainState. "
                            f"Received: {errors.describe(returned)}. End it with `return {{\"loss\": loss}}, "
                            "state.apply_gradients(grads)`, or with `return super().train_step(state, batch)`.")
        logs, new_state = check_logs(metrics.finished(returned[0]), "train_step"), returned[1]
        _warn_if_nothing_is_trained(train_step, state, new_state)
        _warn_if_averages_are_dropped(train_step, state, new_state, context.new_averages)

        is_merged = False

        def with_logs(leaves: list[jax.Array]) -> list[jax.Array]:
            nonlocal logs, is_merged
            logs, sums = merge_over_replicas(logs, leaves, context)
            is_merged = True
            return sums

        left = leave_replica(context, "train_step", state, new_state.replace(step=state.step + 1), with_logs)
        if not is_merged:
            logs, _ = merge_over_replicas(logs, [], context)
        return left, logs, context.global_rows


def _warn_if_nothing_is_trained(train_step: Step, before: TrainState, after: TrainState) -> None:
    """Warns if an overridden `train_step` returns exactly the arrays of its input state."""
    may_train = before.optimizer is not None and getattr(getattr(train_step, "__self__", None), "trainable", True)
    if _is_inherited(train_step) or not may_train or not jax.tree.leaves(before.trainable(before.params)):
        return
    leaves, received = jax.tree.leaves(after), jax.tree.leaves(before)
    if len(leaves) == len(received) and all(new is old for new, old in zip(leaves, received, strict=True)):
        warnings.warn("`train_step` returned the state that it was given, so nothing is trained. Return what "
                      "`state.apply_gradients(...)` returned, or the state of `super().train_step(state, batch)`.",
                      UserWarning, stacklevel=user_stacklevel())


def _warn_if_averages_are_dropped(
    train_step: Step, before: TrainState, after: TrainState, new_averages: Collection[str]
) -> None:
    """Warns if an overridden `train_step` has computed running averages of BatchNorm, and returns the former."""
    if _is_inherited(train_step) or not new_averages:
        return
    returned, received = named_leaves(after.model_state), named_leaves(before.model_state)
    if all(returned.get(path) is received.get(path) for path in new_averages):
        warnings.warn("`train_step` leaves out the model state that `apply` returned, so that `evaluate` and `predict` "
                      "use the first averages of BatchNorm. Write `outputs, model_state = self.apply(params, state, x, "
                      "training=True)`, and return `state.apply_gradients(grads, model_state=model_state)`.",
                      UserWarning, stacklevel=user_stacklevel())


def _is_inherited(train_step: Step) -> bool:
    return str(getattr(train_step, "__module__", "")).startswith("trainer.")


@contextlib.contextmanager
def _tracing(step: Step) -> Iterator[TracedMetrics]:
    """Rejects values that would be constants in a compiled step, inside the block, and lets the step update metrics."""
    with trace_purity.given_its_state(step, getattr(step, "__self__", None)), traced_metrics() as metrics:
        yield metrics


def with_logs_of_updates(
    before: TrainState, after: TrainState, logs: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Returns the logs of a step with norms, if they are kept, and of skipped updates, if updates may be skipped.

    "skipped_steps" counts them. With `skip_non_finite`, and not only a loss scale, "skipped_in_a_row" is the largest
    number in a row. With a `SpikeRule`, "spike_streaks" counts its streaks.
    """
    norms = after.norm_logs
    for name in logs:
        if name in norms:
            raise ValueError(f"`train_step` returns the log {name!r}, and so does `compile(log_norms=True)`. Give one "
                             "of them another name, or leave `log_norms` out.")
    logs = {**logs, **norms}
    skipped_before, skipped_after = before.skipped_updates, after.skipped_updates
    if skipped_before is None or skipped_after is None:
        return OrderedDict(logs)
    counts: list[tuple[Metric, Any]] = [(_skipped_steps(), skipped_after.total - skipped_before.total)]
    if after.skips_non_finite:
        counts.append((_skipped_in_a_row(), skipped_after.in_a_row))
    if (streak := after.spike_streak) is not None:
        is_streak = (skipped_after.in_a_row > 0) & (skipped_after.in_a_row % streak == 0)
        counts.append((_spike_streaks(), is_streak))
    values = {metric.name: MetricValue([count.astype(jnp.float32)], metric) for metric, count in counts}
    return OrderedDict({**logs, **values})


# Metrics are created on demand, because their first array starts JAX's backend.


@functools.cache
def _skipped_steps() -> Sum:
    return Sum(name="skipped_steps")


@functools.cache
def _spike_streaks() -> Sum:
    return Sum(name="spike_streaks")


@functools.cache
def _skipped_in_a_row() -> Metric:
    return _Most(name="skipped_in_a_row")


class _Most(Metric):
    """The largest of some counts."""

    additive = False

    def __init__(self, name: str):
        super().__init__(name=name)
        self.most = self.add_variable(name="most")

    def merge_variables(self, first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        return [jnp.maximum(one, other) for one, other in zip(first, second, strict=True)]

    def result(self) -> jax.Array:
        return self.most.value


def test_one_batch(
    test_step: Step, make_context: ContextFactory, state: TrainState, batch: PyTree
) -> tuple[dict[str, Any], Any]:
    """Returns the logs of the whole batch, and its number of real rows."""
    with replica_context.enter(make_context(rows_of(batch))) as context:
        with _tracing(test_step) as metrics:
            logs = _without_state(test_step(context.gather_params(state), batch))
        logs, _ = merge_over_replicas(check_logs(metrics.finished(logs), "test_step"), [], context)
        return logs, context.global_rows


def predict_one_batch(
    predict_step: Step, make_context: ContextFactory, state: TrainState, batch: PyTree
) -> Any:
    """Returns the outputs for the rows of a batch.

    Raises:
      ValueError: if the first axis of an output is not these rows.
    """
    rows = rows_of(batch)
    with replica_context.enter(make_context(rows)) as context:
        with _tracing(predict_step):
            outputs = _without_state(predict_step(context.gather_params(state), batch))
        for leaf in jax.tree.leaves(outputs):
            if jnp.shape(leaf)[:1] != (rows,):
                raise without_rows(
                    outputs, rows, "Reshape them to (rows, ...), or override `predict_step`, and return only outputs "
                    "of the rows: `return super().predict_step(state, batch)[0]`.")
        return outputs


def train_group(
    one_batch: Callable[..., Any], fused: bool, state: TrainState, running: RunningLogs, data: PyTree,
    start: jax.Array, stop: jax.Array, count: int | None,
) -> tuple[TrainState, RunningLogs]:
    """Returns the state and the running logs after train steps on the batches from `start` to `stop` of `data`.

    Here and below, `count` is the number of batches, if it is a constant of the program.
    """

    def body(index: Any, carry: tuple[TrainState, RunningLogs]) -> tuple[TrainState, RunningLogs]:
        state, running = carry
        state, logs, rows = one_batch(state, batch_at(data, index))
        return state, add_step(running, logs, rows)

    return _repeat(body, fused, start, stop, count, (state, running))


def test_group(
    one_batch: Callable[..., Any], fused: bool, state: TrainState, running: RunningLogs, data: PyTree,
    start: jax.Array, stop: jax.Array, count: int | None,
) -> RunningLogs:
    """Returns the running logs after evaluating the batches from `start` to `stop` of `data`."""

    def body(index: Any, running: RunningLogs) -> RunningLogs:
        logs, rows = one_batch(state, batch_at(data, index))
        return add_step(running, logs, rows)

    return _repeat(body, fused, start, stop, count, running)


def predict_group(
    one_batch: Callable[..., Any], fused: bool, state: TrainState, data: PyTree, start: jax.Array,
    stop: jax.Array, count: int | None,
) -> Any:
    """Returns the stacked outputs for each batch of `data`; only the outputs from `start` to `stop` are defined."""
    if not fused:
        return jax.tree.map(lambda leaf: leaf[None], one_batch(state, batch_at(data, 0)))
    stack = stack_length(data)
    shapes = jax.eval_shape(lambda: one_batch(state, batch_at(data, 0)))
    outputs = jax.tree.map(lambda leaf: jnp.zeros((stack, *leaf.shape), leaf.dtype), shapes)

    def body(index: Any, outputs: PyTree) -> Any:
        batch_outputs = one_batch(state, batch_at(data, index))
        return jax.tree.map(lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, index, 0),
                            outputs, batch_outputs)

    return _repeat(body, True, start, stop, count, outputs)


def _repeat(
    body: Callable[[Any, Any], Any], fused: bool, start: jax.Array, stop: jax.Array, count: int | None, carry: Any
) -> Any:
    if not fused:
        return body(0, carry)
    # With bounds as arguments, an executable serves any number of steps. On a GPU such a loop waits for the host in
    # each iteration; with a constant count it does not. Both are loops, so that the bits of a step do not depend on the
    # division of steps into groups, unlike unrolled steps.
    if count is None:
        return lax.fori_loop(start, stop, body, carry)
    return lax.fori_loop(0, count, lambda turn, carry: body(start + turn, carry), carry)


def _without_state(returned: Any) -> Any:
    # As in Keras on JAX, these steps may also return `(value, state)`.
    has_state = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], TrainState)
    return returned[0] if has_state else returned

