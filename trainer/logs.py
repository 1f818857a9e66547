"""The logs of a step, and their running totals over an epoch, as pytrees that stay on the device.

A step's log is a scalar or a metric's accumulators. Logs are ordered dicts, whose order compiled code keeps. Totals are
compensated sums (Neumaier, "Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen", 1974): a plain
float32 count stops growing at 2**24 rows.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer import errors
from trainer.metrics import Metric
from trainer.replica import ReplicaContext


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MetricValue:
    """A metric's accumulators over some rows.

    Attributes:
      variables: the accumulators, as `Metric.stateless_update_state` returns them.
      metric: the metric that can merge and finish them.
    """

    variables: list[jax.Array]
    metric: Metric = dataclasses.field(metadata={"static": True})

    @property
    def result(self) -> Any:
        """The metric's value over these rows."""
        return self.metric.stateless_result(self.variables)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningLog:
    """The total of one log over the steps so far.

    Attributes:
      total: a metric's accumulators, or [sum of value * rows, rows] of a scalar.
      correction: what rounding has taken from `total`; empty for a metric that merges in its own way.
      metric: the metric that finishes `total`; None for a scalar.
    """

    total: list[jax.Array]
    correction: list[jax.Array]
    metric: Metric | None = dataclasses.field(metadata={"static": True})

    def result(self) -> Any:
        """Returns the metric's value, or the scalar's mean over the rows."""
        total = self.total
        if self.correction:
            total = [value + lost for value, lost in zip(total, self.correction, strict=True)]
        if self.metric is not None:
            return self.metric.stateless_result(total)
        return total[0] / jnp.maximum(total[1], 1.0)


def check_logs(logs: Any, origin: str) -> OrderedDict[str, Any]:
    """Returns a step's logs in their order, with scalars as float32 arrays.

    Raises:
      TypeError: if `logs` is not a dict of scalars and metric values.
    """
    if not isinstance(logs, Mapping):
        raise TypeError(f"`{origin}` must return its logs as a dict of names. Received: {errors.describe(logs)}.")
    checked: OrderedDict[str, Any] = OrderedDict()
    for name, value in logs.items():
        if not isinstance(value, MetricValue):
            if not isinstance(value, (int, float, np.ndarray, np.generic, jax.Array)) or np.ndim(value):
                raise TypeError(f"`{origin}` returned {errors.describe(value)} as log {name!r}. A log is a scalar or "
                                "what `compute_metrics` returns: take a mean over the rows, for example.")
            value = jnp.asarray(value, jnp.float32)
        checked[name] = value
    return checked


def merge_over_replicas(
    logs: Mapping[str, Any], also_mean: Any, context: ReplicaContext
) -> tuple[OrderedDict[str, Any], Any]:
    """Returns the logs of the whole batch from those of each replica.

    Scalars are averaged, accumulators merged. All that is summed shares one reduction, with `also_mean` in it.

    Args:
      logs: this replica's logs.
      also_mean: a tree of floating arrays to be averaged over the replicas as well.
      context: the replica's context.
    """
    scalars = {name: value for name, value in logs.items() if not isinstance(value, MetricValue)}
    sums = {name: value.variables for name, value in logs.items()
            if isinstance(value, MetricValue) and value.metric.additive}
    share = 1.0 / context.num_replicas_in_sync
    shares = jax.tree.map(lambda leaf: leaf * share, (scalars, also_mean)) if share != 1.0 else (scalars, also_mean)
    (scalars, also_mean), sums = context.sum((shares, sums))
    merged: OrderedDict[str, Any] = OrderedDict()
    for name, value in logs.items():
        if not isinstance(value, MetricValue):
            merged[name] = scalars[name]
        elif value.metric.additive:
            merged[name] = dataclasses.replace(value, variables=sums[name])
        else:
            gathered = context.all_gather([leaf[None] for leaf in value.variables])
            parts = [[leaf[replica] for leaf in gathered] for replica in range(context.num_replicas_in_sync)]
            variables = parts[0]
            for part in parts[1:]:
                variables = value.metric.merge_variables(variables, part)
            merged[name] = dataclasses.replace(value, variables=variables)
    return merged, also_mean


def empty_running_logs(logs: Mapping[str, Any]) -> OrderedDict[str, RunningLog]:
    """Returns totals over no steps, for logs such as `logs` (whose leaves may be `jax.ShapeDtypeStruct`s)."""
    running: OrderedDict[str, RunningLog] = OrderedDict()
    for name, value in logs.items():
        if isinstance(value, MetricValue):
            total = [jnp.asarray(leaf) for leaf in value.metric.stateless_reset_state()]
            compensated = value.metric.additive
        else:
            total, compensated = [jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)], True
        correction = [jnp.zeros_like(leaf) for leaf in total] if compensated else []
        metric = value.metric if isinstance(value, MetricValue) else None
        running[name] = RunningLog(total=total, correction=correction, metric=metric)
    return running


def add_step(
    running: Mapping[str, RunningLog], logs: Mapping[str, Any], rows: Any
) -> OrderedDict[str, RunningLog]:
    """Returns the totals with one more step.

    Args:
      running: the totals so far.
      logs: the step's logs, merged over replicas.
      rows: the step's real rows over all replicas; scalars weigh as much.
    """
    updated: OrderedDict[str, RunningLog] = OrderedDict()
    for name, so_far in running.items():
        value = logs[name]
        if not isinstance(value, MetricValue):
            weight = jnp.asarray(rows, jnp.float32)
            step_total = [value * weight, weight]
        else:
            step_total = value.variables
        if not so_far.correction:
            total = so_far.metric.merge_variables(so_far.total, step_total) if so_far.metric else step_total
            updated[name] = dataclasses.replace(so_far, total=total)
            continue
        sums = [_add_compensated(*parts) for parts in zip(so_far.total, so_far.correction, step_total, strict=True)]
        updated[name] = dataclasses.replace(
            so_far, total=[total for total, _ in sums], correction=[lost for _, lost in sums])
    return updated


def _add_compensated(total: jax.Array, lost: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    new_total = total + value
    rounding = jnp.where(jnp.abs(total) >= jnp.abs(value), (total - new_total) + value, (value - new_total) + total)
    return new_total, lost + rounding.astype(lost.dtype)


def results(running: Mapping[str, RunningLog]) -> OrderedDict[str, Any]:
    """Returns each log's value over the steps so far; a metric whose result is a dict gives one log per entry."""
    values: OrderedDict[str, Any] = OrderedDict()
    for name, log in running.items():
        value = log.result()
        values.update(value if isinstance(value, Mapping) else {name: value})
    return values


_FIRST = "float32"  # the dtype of a vector that is always there, of which the first number means nothing


def packed(running: Any) -> dict[str, jax.Array]:
    """Returns the arrays of running logs joined to one vector for each dtype: each array costs an execution time.

    There is one even without logs, so that one can wait for the execution that it comes from.
    """
    vectors: dict[str, list[jax.Array]] = {_FIRST: [jnp.zeros(1, _FIRST)]}
    for leaf in jax.tree.leaves(running):
        vectors.setdefault(leaf.dtype.name, []).append(jnp.ravel(leaf))
    return {dtype: jnp.concatenate(parts) for dtype, parts in vectors.items()}


def unpacked(vectors: Mapping[str, jax.Array], like: Any) -> Any:
    """Returns what `packed` was given, whose tree and shapes are those of `like`."""
    leaves, structure = jax.tree.flatten(like)
    starts, found = {name: int(name == _FIRST) for name in vectors}, []
    for leaf in leaves:
        name = leaf.dtype.name
        stop = starts[name] + leaf.size
        found.append(vectors[name][starts[name]:stop].reshape(leaf.shape))
        starts[name] = stop
    return jax.tree.unflatten(structure, found)
