"""Gradient accumulation: a batch computed in sequential microbatches, for activations that do not fit at once.

Microbatch j of k has the rows j, j + k, j + 2k and so on, whatever the number of devices: rows that are split over
devices stay in place. The losses of `compile` are exact over the microbatches, even if they divide by a sum of weights:
such sums do not depend on the gradients, so a first pass computes them, from which the compiler drops everything else.
Model state passes from microbatch to microbatch.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trainer.core import replica_context
from trainer.core.replica_context import ReduceOp, ReplicaContext, divide_sum, get_replica_context
from trainer.core.rng import stream_key
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import restricted
from trainer.core.types import PyTree
from trainer.metrics.base import MetricValue

Compute = Callable[[Any, Any], tuple[Any, Any, dict[str, Any]]]


class _PartContext(ReplicaContext):
    """The context of a microbatch of a replica's rows; `divisors` are the divisors of means, None in the first pass."""

    is_part = True

    def __init__(self, whole: ReplicaContext, number: Any, rows: int, mask: jax.Array | None,
                 divisors: list[Any] | None):
        super().__init__(rows, mask)
        self.num_replicas_in_sync = whole.num_replicas_in_sync
        self.batch_norm_groups = whole.batch_norm_groups if rows % whole.batch_norm_groups == 0 else 1
        self.own_divisors: list[Any] = []
        self._whole = whole
        self._number = number
        self._size = rows
        self._divisors = divisors

    @property
    def replica_id_in_sync_group(self) -> Any:
        return self._whole.replica_id_in_sync_group

    def random_key(self, seed: int | jax.Array, stream: str, step: int | jax.Array) -> jax.Array:
        return stream_key(seed, stream, step, self._number)

    def share_of_mean(self, total: jax.Array, divisor: jax.Array | int) -> jax.Array:
        if isinstance(divisor, int):
            return divide_sum(total, divisor)
        self.own_divisors.append(divisor)
        if self._divisors is None:
            return total
        return divide_sum(self.share_of_sum(total), self._divisors[len(self.own_divisors) - 1])

    def share_of_sum(self, total: jax.Array) -> jax.Array:
        assert self._whole.rows is not None, "it has parts"
        return self._whole.share_of_sum(total) * (self._whole.rows / self._size)

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree, options: Any = None) -> Any:
        return self._whole.all_reduce(reduce_op, value, options)

    def sum(self, value: PyTree) -> Any:
        return self._whole.sum(value)

    def all_gather(self, value: PyTree, axis: int = 0) -> Any:
        return self._whole.all_gather(value, axis)


def accumulated(
    compute: Compute, before: TrainState, batch: PyTree, microbatches: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns gradients, model state and logs of this replica's rows of a batch, computed in microbatches.

    Args:
      compute: returns these three for the state and some rows. Gradients and scalar logs are this replica's share: the
        mean over replicas and, weighted by rows, over microbatches is the value of the batch.
      before: the training state before the step.
      batch: a tree of arrays, rows first.
      microbatches: maximum number of microbatches; fewer if there are fewer rows.
    """
    whole = get_replica_context()
    rows = jax.tree.leaves(batch)[0].shape[0]
    parts = min(microbatches, rows)
    groups = _split((batch, whole.padding_mask), rows, parts)

    def context_of(part: Any, part_batch: Any, mask: jax.Array | None, divisors: list[Any] | None) -> _PartContext:
        size = jax.tree.leaves(part_batch)[0].shape[0]
        number = whole.replica_id_in_sync_group * parts + part if whole.keys_differ else part
        return _PartContext(whole, number, size, mask, divisors)

    def own_divisors(inputs: tuple[Any, Any]) -> list[Any]:
        part, (part_batch, mask) = inputs
        context = context_of(part, part_batch, mask, None)
        with replica_context.enter(context):
            compute(before, part_batch)
        return context.own_divisors

    divisors: list[Any] = []
    if jax.eval_shape(own_divisors, _first(groups[0])):
        divisors = whole.sum(jax.tree.map(
            lambda *sums: sum(each.sum(0) for each in sums), *(lax.map(own_divisors, group) for group in groups)))

    is_changed: list[bool] = []

    def compute_part(model_state: Any, inputs: tuple[Any, Any]) -> tuple[Any, Any, OrderedDict[str, Any]]:
        part, (part_batch, mask) = inputs
        part_batch = whole.with_rows_in_place(part_batch)
        with replica_context.enter(context_of(part, part_batch, mask, divisors)):
            grads, after, logs = compute(before.replace(model_state=model_state), part_batch)
        after = restricted(after, model_state)
        is_changed[:] = [new is not old for new, old in zip(
            jax.tree.leaves(after), jax.tree.leaves(model_state), strict=True)]
        after = jax.tree.map(lambda new, old: new if new is old else jnp.asarray(new, old.dtype), after, model_state)
        share = jax.tree.leaves(part_batch)[0].shape[0] / rows
        return grads, after, OrderedDict(
            (name, value if isinstance(value, MetricValue) else value * share) for name, value in logs.items())

    def add_part(carry: Any, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        total, model_state = carry
        grads, model_state, logs = compute_part(model_state, inputs)
        share = jax.tree.leaves(inputs[1])[0].shape[0] / rows
        total = jax.tree.map(lambda sum_, leaf: sum_ + leaf.astype(sum_.dtype) * share, total, grads)
        return (total, model_state), logs

    shapes = jax.eval_shape(compute_part, before.model_state, _first(groups[0]))[0]
    # In float32, because small terms would vanish in a 16-bit sum.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), shapes)
    carry, logs_of_parts = (zeros, before.model_state), []
    for group in groups:
        carry, logs = lax.scan(add_part, carry, group)
        logs_of_parts += [jax.tree.map(lambda leaf, part=part: leaf[part], logs) for part in range(len(group[0]))]
    total, model_state = carry
    old, structure = jax.tree.flatten(before.model_state)  # leaves that no microbatch changes keep their bits
    model_state = jax.tree.unflatten(structure, [new if is_new else leaf for leaf, new, is_new in zip(
        old, jax.tree.leaves(model_state), is_changed, strict=True)])
    grads = jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), total, shapes)
    return grads, model_state, {name: _merged([logs[name] for logs in logs_of_parts]) for name in logs_of_parts[0]}


def _first(group: tuple[Any, Any]) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], group)


def _split(tree: PyTree, rows: int, parts: int) -> list[tuple[Any, Any]]:
    """Returns the indices and rows of microbatches, in groups of equal size; the first may have an additional row."""
    size, longer = divmod(rows, parts)

    def strided(leaf: jax.Array) -> jax.Array:  # (parts, size, ...): no rows move between devices
        return leaf[:size * parts].reshape(size, parts, *leaf.shape[1:]).swapaxes(0, 1)

    def first(leaf: jax.Array) -> jax.Array:
        return jnp.concatenate([strided(leaf)[:longer], leaf[size * parts:][:, None]], 1)

    shorter = jnp.arange(longer, parts), jax.tree.map(lambda leaf: strided(leaf)[longer:], tree)
    return [shorter] if longer == 0 else [(jnp.arange(longer), jax.tree.map(first, tree)), shorter]


def _merged(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, MetricValue):
        return sum(values[1:], first)
    variables = first.variables
    for other in values[1:]:
        variables = first.metric.merge_parts(variables, other.variables)
    return dataclasses.replace(first, variables=variables)
