"""Metric objects that a step updates, as in Keras's guides; their accumulators become logs of the step.

A step is traced once, so the objects cannot hold results. While it is traced, `update_state` accumulates here, and
`result()` represents the metric over the epoch: the logs carry its accumulators, which are merged over steps and reset
in each epoch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state

from trainer.core.replica_context import get_replica_context
from trainer.losses.base import broadcast_sample_weight
from trainer.metrics.base import Metric, MetricValue, is_builtin, metrics_kept_by, step_metrics


class TracedMetrics:
    """The metrics that a step has updated so far."""

    def __init__(self) -> None:
        self._values: dict[int, MetricValue] = {}
        self._computed: dict[int, MetricValue] = {}
        self._asked: set[int] = set()
        self._trace = get_opaque_trace_state(convention="flax")

    @property
    def updated(self) -> list[Metric]:
        """The metrics in the order of their first updates."""
        return [value.metric for value in self._values.values()]

    def update_state(self, metric: Metric, *args: Any, **kwargs: Any) -> None:
        """Accumulates the arguments of `metric.update_state`."""
        self._check_trace(metric)
        variables = self._variables(metric, *args)
        self._values[id(metric)] = MetricValue(updated(metric, variables, *args, **kwargs), metric)

    def result(self, metric: Metric) -> MetricValue:
        """Returns the accumulators of a metric, which `finished` updates."""
        self._asked.add(id(metric))
        return MetricValue(self._variables(metric), metric)

    def computed(self, value: MetricValue) -> None:
        """Records the value that `Model.compute_metrics` has computed for a metric of `compile`, as its result."""
        self._computed[id(value.metric)] = value

    def reset_state(self, metric: Metric) -> None:
        """Raises TypeError: metrics are reset in each epoch."""
        raise TypeError(f"The step resets the metric {metric.name!r}. Metrics that a step updates begin again with "
                        "each epoch: leave `reset_state()` out.")

    def finished(self, logs: Any) -> Any:
        """Returns a step's logs with the final accumulators of their metrics, including updates after `result`.

        Raises:
          ValueError: if a log is the result of a metric that the step has not updated: it would always be 0.
        """
        if isinstance(logs, Mapping):  # `jax.tree.map` would sort them
            return {name: self.finished(value) for name, value in logs.items()}
        if not isinstance(logs, MetricValue):
            return logs
        key = id(logs.metric)
        if key not in self._asked:
            return logs
        value = self._values.get(key, self._computed.get(key))
        if value is None:
            raise ValueError(f"The step returns the result of the metric {logs.metric.name!r}, which it has not "
                             "updated. Call its `update_state` in the step, or leave it out of the logs.")
        return value

    def _variables(self, metric: Metric, *args: Any) -> list[jax.Array]:
        value = self._values.get(id(metric), self._computed.get(id(metric)))
        if value is not None:
            return value.variables
        if len(args) > 1:
            with jax.ensure_compile_time_eval():
                metric.build(*args[:2])
        return metric.stateless_reset_state()

    def _check_trace(self, metric: Metric) -> None:
        if get_opaque_trace_state(convention="flax") != self._trace:
            raise TypeError(f"The metric {metric.name!r} is updated inside of a function that JAX transforms, such as "
                            "the function of `jax.value_and_grad`, where its values would be lost. Return the "
                            "values that it needs (`has_aux=True`), and update it afterwards.")


@contextlib.contextmanager
def traced_metrics() -> Iterator[TracedMetrics]:
    """Lets the step that the block traces update metrics."""
    metrics = TracedMetrics()
    with metrics_kept_by(metrics):
        yield metrics


@contextlib.contextmanager
def metrics_of_transformed(values: list[MetricValue]) -> Iterator[None]:
    """Lets a function that JAX transforms update metrics in the block; their accumulators are appended to `values`.

    The function returns `values`, and `add` adds them outside of it.
    """
    outer = step_metrics()
    if not isinstance(outer, TracedMetrics):
        yield
        return
    with traced_metrics() as inner:
        yield
    values.extend(inner._values.values())


def add(values: list[MetricValue]) -> None:
    """Adds metric values that were accumulated elsewhere to the step that is being traced."""
    metrics = step_metrics()
    if isinstance(metrics, TracedMetrics):
        for value in values:
            metric = value.metric
            metrics._check_trace(metric)
            metrics._values[id(metric)] = MetricValue(
                metric.merge_variables(metrics._variables(metric), value.variables), metric)


def computed(value: MetricValue) -> MetricValue:
    """Records and returns a metric's value from `compute_metrics` as its result in the step that is being traced."""
    metrics = step_metrics()
    if isinstance(metrics, TracedMetrics):
        metrics.computed(value)
    return value


def results() -> dict[str, MetricValue]:
    """Returns the results of the metrics that the traced step has updated so far, by name."""
    metrics = step_metrics()
    return {} if not isinstance(metrics, TracedMetrics) else {
        metric.name: metrics.result(metric) for metric in metrics.updated}


def updated(metric: Metric, variables: list[jax.Array], *args: Any, **kwargs: Any) -> list[jax.Array]:
    """Returns a metric's accumulators after an update in a step.

    On replicas, only real rows count, and values without rows, such as the loss of a batch, count once for all
    replicas.

    Args:
      variables: its accumulators before.
      *args: arguments of `update_state`.
      **kwargs: keyword arguments of `update_state`.
    """
    context = get_replica_context()
    rows, mask = context.rows, context.padding_mask
    leaves, structure = jax.tree.flatten((args, kwargs))
    has_rows = [rows is not None and jnp.shape(leaf)[:1] == (rows,) for leaf in leaves]
    if not any(has_rows):
        return _updated_once(metric, variables, context.num_replicas_in_sync, *args, **kwargs)
    if mask is None:
        return metric.stateless_update_state(variables, *args, **kwargs)
    if is_builtin(metric):
        bound = inspect.signature(metric.update_state).bind(*args, **kwargs)
        given = bound.arguments.get("sample_weight")
        weights = mask if given is None else given * broadcast_sample_weight(given, mask)

        def update(sample_weight: jax.Array) -> list[jax.Array]:
            bound.arguments["sample_weight"] = sample_weight
            return metric.stateless_update_state(variables, *bound.args, **bound.kwargs)

        if _uses(update, weights):
            return update(weights)

    # A metric that ignores weights, or uses them in an unknown way, must not see padding.
    fresh = metric.stateless_reset_state()

    def add_row(variables: list[jax.Array], row: Any) -> tuple[list[jax.Array], None]:
        is_real, *parts = row
        own = iter(parts)
        args, kwargs = jax.tree.unflatten(
            structure, [next(own)[None] if has else leaf for has, leaf in zip(has_rows, leaves, strict=True)])
        if metric.additive:
            after = metric.stateless_update_state(variables, *args, **kwargs)
        else:
            after = metric.merge_parts(variables, metric.stateless_update_state(fresh, *args, **kwargs))
        return [jnp.where(is_real > 0, new, old) for new, old in zip(after, variables, strict=True)], None

    scanned = [jnp.asarray(leaf) for has, leaf in zip(has_rows, leaves, strict=True) if has]
    return lax.scan(add_row, [jnp.asarray(leaf) for leaf in variables], (mask, *scanned))[0]


def _updated_once(metric: Metric, variables: list[jax.Array], replicas: int, *args: Any,
                  **kwargs: Any) -> list[jax.Array]:
    after = metric.stateless_update_state(metric.stateless_reset_state(), *args, **kwargs)
    if metric.additive and replicas > 1:
        if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in after):
            raise TypeError(f"The metric {metric.name!r}, whose variables are integers, is updated in a step with "
                            "values that have no rows. Several replicas cannot share them: pass one value per row.")
        after = [leaf / replicas for leaf in after]
    return metric.merge_variables(variables, after)


def _uses(function: Callable[..., Any], argument: jax.Array) -> bool:
    program = jax.make_jaxpr(function)(argument).jaxpr
    return any(program.invars[0] is variable for equation in program.eqns for variable in equation.invars)
