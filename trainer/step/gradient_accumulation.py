"""A batch computed in parts, one after another, for models whose activations do not fit at once.

Owns the view that code inside a step has of its part. To the loss and the metrics, the k parts of each of n replicas
look like n * k replicas: so their exact arithmetic over replicas is exact over parts as well. A sum over all replicas
then needs parts that are not computed yet. Only what the loss divides by is summed, such as the sum of weights, and
that does not depend on the gradients; so it is summed in a first pass, from which the compiler drops all else.

The module sees its part alone: BatchNorm takes the statistics of one part of all replicas, and its running averages
become the mean over the parts, weighted by rows.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trainer.core import replica_context
from trainer.core.replica_context import ReduceOp, ReplicaContext, get_replica_context
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import restricted
from trainer.distribute.replica.state_reduction import over_parts
from trainer.metrics.base import MetricValue

Compute = Callable[[Any], tuple[Any, Any, dict[str, Any]]]


class _ModuleContext(ReplicaContext):
    """What a module sees: the same part of all replicas."""

    def __init__(self, whole: ReplicaContext, number: Any, rows: int, mask: jax.Array | None):
        super().__init__(rows, mask)
        self._whole = whole
        self._number = number
        self._size = rows
        self.num_replicas_in_sync = whole.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        return self._number  # of the part among those of all replicas, so that each has random numbers of its own

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        return self._whole.all_reduce(reduce_op, value, options)

    def sum(self, value: Any) -> Any:
        return self._whole.sum(value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        return self._whole.all_gather(value, axis)


class _PartContext(_ModuleContext):
    """What the loss and the metrics see: one of n * k replicas.

    Args:
      whole: the context of the replica.
      number: the number of the part among those of all replicas.
      parts: how many parts a replica has.
      rows: the part's rows, padding included.
      mask: float32 of shape `(rows,)`; None if all rows are real.
      sums: what `sum` returns in the order of its calls; None in the first pass.
    """

    def __init__(self, whole: ReplicaContext, number: Any, parts: int, rows: int, mask: jax.Array | None,
                 sums: list[Any] | None):
        super().__init__(whole, number, rows, mask)
        self.num_replicas_in_sync = whole.num_replicas_in_sync * parts
        self.summands: list[Any] = []
        self._parts = parts
        self._sums = sums

    def for_module(self) -> ReplicaContext:
        return _ModuleContext(self._whole, self._number, self._size, self.padding_mask)

    def sum(self, value: Any) -> Any:
        self.summands.append(value)
        return value if self._sums is None else self._sums[len(self.summands) - 1]

    @property
    def global_rows(self) -> Any:
        return self._whole.global_rows

    @property
    def weight_of_module(self) -> Any:
        return self._parts * self.for_module().global_rows / self.global_rows if self.is_padded else 1.0

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        raise _other_parts("all_reduce")

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        raise _other_parts("all_gather")


def _other_parts(method: str) -> ValueError:
    return ValueError(f"`get_replica_context().{method}` cannot be used in `compute_loss` or `compute_metrics` with "
                      "`microbatches`: the other microbatches are not computed yet. Reduce inside of the module, or "
                      "compile without `microbatches`.")


def accumulated(
    compute: Compute, before: TrainState, batch: Any, microbatches: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns gradients, model state and logs of this replica's rows of a batch, computed in parts.

    Args:
      compute: returns these three for some rows. Gradients and scalar logs are this replica's share, whose mean over
        replicas is that of the batch.
      before: the state of training before, with which `compute` begins.
      batch: a tree of arrays, rows first.
      microbatches: how many parts, at most; fewer where there are fewer rows.
    """
    whole = get_replica_context()
    rows = jax.tree.leaves(batch)[0].shape[0]
    parts, size = _parts_and_size(rows, microbatches)
    split, mask = _split(batch, whole.padding_mask, rows, parts, size)

    def context_of(part: Any, part_mask: Any, sums: list[Any] | None) -> _PartContext:
        number = whole.replica_id_in_sync_group * parts + part
        return _PartContext(whole, number, parts, size, part_mask, sums)

    def summands(inputs: tuple[Any, Any, Any]) -> list[Any]:
        part, part_batch, part_mask = inputs
        context = context_of(part, part_mask, None)
        with replica_context.enter(context):
            compute(part_batch)
        return context.summands

    inputs = (jnp.arange(parts), split, mask)
    first = jax.tree.map(lambda leaf: leaf[0], inputs)
    sums: list[Any] = []
    if jax.eval_shape(summands, first):
        sums = whole.sum(jax.tree.map(lambda leaf: leaf.sum(0), lax.map(summands, inputs)))

    changed: list[bool] = []

    def compute_part(inputs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        part, part_batch, part_mask = inputs
        with replica_context.enter(context_of(part, part_mask, sums)):
            grads, model_state, logs = compute(part_batch)
        model_state = restricted(model_state, before.model_state)
        changed[:] = [new is not old for new, old in zip(
            jax.tree.leaves(model_state), jax.tree.leaves(before.model_state), strict=True)]
        real_rows = jnp.float32(size) if part_mask is None else part_mask.sum()
        return grads, model_state, OrderedDict(logs), real_rows

    def add_part(total: Any, inputs: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        grads, *others = compute_part(inputs)
        return jax.tree.map(lambda sum_, leaf: sum_ + leaf.astype(sum_.dtype) / parts, total, grads), others

    shapes = jax.eval_shape(compute_part, first)[0]
    # In float32, as small parts would vanish in a sum of 16 bits.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), shapes)
    total, (model_states, logs, real_rows) = lax.scan(add_part, zeros, inputs)
    grads = jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), total, shapes)
    weights = whole.sum(real_rows)
    model_state = over_parts(before.model_state, model_states, changed, before.state_reduction, weights)
    return grads, model_state, {name: _merged(value, parts) for name, value in logs.items()}


def pads_parts(rows: int, microbatches: int) -> bool:
    """Returns whether the last of the parts of a replica's rows is padded."""
    parts, size = _parts_and_size(rows, microbatches)
    return parts * size != rows


def _parts_and_size(rows: int, microbatches: int) -> tuple[int, int]:
    size = -(-rows // microbatches)
    return -(-rows // size), size


def _split(batch: Any, mask: jax.Array | None, rows: int, parts: int, size: int) -> tuple[Any, jax.Array | None]:
    """Returns a batch with leaves `(parts, size, ...)`, and the mask of real rows `(parts, size)` if any are not."""
    order = np.arange(parts * size)
    if len(order) != rows:
        is_own = jnp.asarray(order < rows, jnp.float32)
        mask = is_own if mask is None else mask[order % rows] * is_own

    def split(leaf: jax.Array) -> jax.Array:
        padded = leaf if len(order) == rows else leaf[order % rows]
        return padded.reshape(parts, size, *leaf.shape[1:])

    return jax.tree.map(split, batch), None if mask is None else mask.reshape(parts, size)


def _merged(value: Any, parts: int) -> Any:
    if not isinstance(value, MetricValue):
        return value.mean(0)
    each = [[leaf[part] for leaf in value.variables] for part in range(parts)]
    variables = each[0]
    for others in each[1:]:
        variables = value.metric.merge_parts(variables, others)
    return dataclasses.replace(value, variables=variables)
