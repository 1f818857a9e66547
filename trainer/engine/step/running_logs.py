"""The logs of a step, and their running totals over an epoch, as pytrees that stay on the device.

A step's log is a scalar or a metric's accumulators. Logs are ordered dicts, whose order compiled code keeps. Totals are
compensated sums (Neumaier, "Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen", 1974): a plain
float32 count stops growing at 2**24 rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import errors
from trainer.core.replica_context import ReplicaContext
from trainer.core.types import ArrayLike
from trainer.data.sources.arrays import canonical_dtype
from trainer.metrics.adapted import logged_value
from trainer.metrics.base import Metric, MetricValue


class _Log(NamedTuple):
    """The form of a log's total; without a metric, the total of a scalar is [sum of value * rows, rows]."""

    name: str
    metric: Metric | None
    accumulators: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def is_summed(self) -> bool:
        """Whether totals are sums; other metrics merge in their own way."""
        return self.metric is None or self.metric.additive


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningLogs:
    """The totals of all logs over the steps so far.

    Sums are concatenated, because every array of an execution and every operation of a small step costs time.

    Attributes:
      sums: for each dtype the sums and, in a second row, their rounding errors; shape `(2, n)`. The float32 entry
        always exists, with 0 as its first sum, so that the loop can wait for the execution even without logs.
      others: the accumulators of each other log.
      logs: the logs, in their order.
    """

    sums: dict[str, jax.Array]
    others: dict[str, list[jax.Array]]
    logs: tuple[_Log, ...] = dataclasses.field(metadata={"static": True})


def check_logs(logs: object, origin: str) -> OrderedDict[str, Any]:
    """Returns a step's logs in their order, with scalars as float32 arrays.

    Raises:
      TypeError: if `logs` is not a dict of scalars and metric values.
    """
    if not isinstance(logs, Mapping):
        raise TypeError(f"`{origin}` must return its logs as a dict of names. Received: {errors.describe(logs)}.")
    checked: OrderedDict[str, Any] = OrderedDict()
    for name, value in _flat({name: logged_value(value) for name, value in logs.items()}):
        if not isinstance(value, MetricValue):
            if not isinstance(value, (int, float, np.ndarray, np.generic, jax.Array)) or np.ndim(value):
                raise TypeError(f"`{origin}` returned {errors.describe(value)} as log {name!r}. A log is a scalar or "
                                "what `compute_metrics` returns: take a mean over the rows, for example.")
            value = jnp.asarray(value, jnp.float32)
        checked[name] = value
    return checked


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # As in Keras, a metric's log may be a dict of several logs.
    for name, value in logs.items():
        yield from value.items() if isinstance(value, Mapping) else [(name, value)]


def merge_over_replicas(
    logs: Mapping[str, Any], also_sum: list[jax.Array], context: ReplicaContext
) -> tuple[OrderedDict[str, Any], list[jax.Array]]:
    """Returns the logs of the whole batch from the logs of each replica, and the sums of `also_sum`.

    Scalars are averaged, accumulators merged. All sums share a single reduction.
    """
    scalars = {name: value for name, value in logs.items() if not isinstance(value, MetricValue)}
    sums = {name: value.variables for name, value in logs.items()
            if isinstance(value, MetricValue) and value.metric.additive}
    share = 1.0 / context.num_replicas_in_sync
    shares = jax.tree.map(lambda leaf: leaf * share, scalars) if share != 1.0 else scalars
    scalars, also_sum, sums = context.sum((shares, also_sum, sums))
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
                variables = value.metric.merge_parts(variables, part)
            merged[name] = dataclasses.replace(value, variables=variables)
    return merged, also_sum


def empty_running_logs(logs: Mapping[str, Any]) -> RunningLogs:
    """Returns totals over no steps, for logs such as `logs` (whose leaves may be `jax.ShapeDtypeStruct`s).

    They are numpy arrays, so that nothing has to be compiled.
    """
    empty: dict[str, list[Any]] = {}
    kinds: list[_Log] = []
    for name, value in logs.items():
        metric = value.metric if isinstance(value, MetricValue) else None
        zero = np.zeros((), np.float32)
        empty[name] = [zero, zero] if metric is None else list(map(_as_numpy, metric.stateless_reset_state()))
        kinds.append(_Log(name, metric, tuple((leaf.shape, leaf.dtype.name) for leaf in empty[name])))
    sums: dict[str, Any] = {
        dtype: np.stack([total, np.zeros_like(total)]) for dtype, total in _joined(kinds, empty, np).items()}
    return RunningLogs(sums, {log.name: empty[log.name] for log in kinds if not log.is_summed}, tuple(kinds))


def _as_numpy(value: object) -> np.ndarray:
    """Returns a value in JAX's dtype for it."""
    array = np.asarray(value)
    return array.astype(canonical_dtype(array.dtype))


def add_step(running: RunningLogs, logs: Mapping[str, Any], rows: ArrayLike) -> RunningLogs:
    """Returns the totals with a further step; scalars are weighted by the number of rows."""
    weight = jnp.asarray(rows, jnp.float32)
    step = {name: value.variables if isinstance(value, MetricValue) else [value * weight, weight]
            for name, value in logs.items()}
    added = _joined(running.logs, step)
    sums = {dtype: _add_compensated(so_far, added[dtype]) for dtype, so_far in running.sums.items()}
    others = {log.name: log.metric.merge_variables(running.others[log.name], step[log.name])
              for log in running.logs if log.metric is not None and not log.is_summed}
    return dataclasses.replace(running, sums=sums, others=others)


def results(running: RunningLogs) -> OrderedDict[str, Any]:
    """Returns each log's value over the steps so far; a metric with a dict as its result gives a log per entry."""
    totals = _totals(running)
    values: OrderedDict[str, Any] = OrderedDict()
    for log in running.logs:
        total = totals[log.name]
        value = total[0] / jnp.maximum(total[1], 1.0) if log.metric is None else log.metric.stateless_result(total)
        values.update(value if isinstance(value, Mapping) else {log.name: value})
    return values


def metrics_of(running: RunningLogs) -> Iterator[tuple[Metric, Sequence[Any]]]:
    """Yields the metrics among the logs, with their accumulators over the steps so far."""
    totals = _totals(running)
    yield from ((log.metric, totals[log.name]) for log in running.logs if log.metric is not None)


def _totals(running: RunningLogs) -> dict[str, list[Any]]:
    sums = {dtype: sums[0] + sums[1] for dtype, sums in running.sums.items()}
    return {**running.others, **_split(running.logs, sums)}


def _joined(logs: Sequence[_Log], values: Mapping[str, Sequence[Any]], numpy: Any = jnp) -> dict[str, Any]:
    """Returns the accumulators of summed logs, concatenated by `numpy` to a vector for each dtype."""
    parts: dict[str, list[Any]] = {"float32": [numpy.zeros(1, np.float32)]}
    for log in logs:
        if log.is_summed:
            for value, (shape, dtype) in zip(values[log.name], log.accumulators, strict=True):
                if jnp.shape(value) != shape or jnp.promote_types(jnp.result_type(value), dtype) != dtype:
                    raise TypeError(f"An accumulator of the metric {log.name!r} has shape {jnp.shape(value)} and dtype "
                                    f"{jnp.result_type(value)} after a step, but {shape} and {dtype} before it. "
                                    "`stateless_update_state` must keep both.")
                parts.setdefault(dtype, []).append(numpy.ravel(value).astype(dtype))
    return {dtype: numpy.concatenate(vectors) for dtype, vectors in parts.items()}


def _split(logs: Sequence[_Log], vectors: Mapping[str, jax.Array]) -> dict[str, list[jax.Array]]:
    """Returns the accumulators from the vectors of `_joined`."""
    starts = {dtype: int(dtype == "float32") for dtype in vectors}
    values: dict[str, list[jax.Array]] = {}
    for log in logs:
        if log.is_summed:
            values[log.name] = []
            for shape, dtype in log.accumulators:
                start, starts[dtype] = starts[dtype], starts[dtype] + math.prod(shape)
                values[log.name].append(vectors[dtype][start:starts[dtype]].reshape(shape))
    return values


def _add_compensated(sums: jax.Array, values: jax.Array) -> jax.Array:
    total, lost = sums
    new_total = total + values
    rounding = jnp.where(jnp.abs(total) >= jnp.abs(values), (total - new_total) + values, (values - new_total) + total)
    return jnp.stack([new_total, lost + rounding])
