"""Reduction of model state that the replicas of `strategy.run` have changed.

Owns the rule: floating-point arrays become their mean, weighted by real rows, and replicas must agree in all others. An
array of any kind that a function leaves alone keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.core import tree_paths
from trainer.core.replica_context import ReplicaContext
from trainer.core.types import PyTree

SumOverReplicas = Callable[[list[jax.Array]], Sequence[jax.Array]]


def _is_averaged(value: object) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def over_replicas(
    before: PyTree, after: PyTree, context: ReplicaContext, sum_over_replicas: SumOverReplicas | None = None
) -> Any:
    """Returns model state that is equal on all replicas, from this replica's state before and after a step.

    Arrays of integers, such as counts, are the replica's own; `differences` tells whether they are equal. Arrays are
    summed by `sum_over_replicas`, by default in a separate reduction.
    """
    if context.num_replicas_in_sync == 1:
        return after
    old, structure = jax.tree.flatten(before)
    merged = jax.tree.leaves(after)
    averaged = [index for index, new in enumerate(merged) if new is not old[index] and _is_averaged(new)]
    share = context.row_share
    summands = [merged[index] * share for index in averaged]
    if context.is_padded:  # a replica whose rows are all padding may have divided by their number
        summands = [jnp.where(share > 0, summand, jnp.zeros_like(summand)) for summand in summands]
    for index, total in zip(averaged, (sum_over_replicas or context.sum)(summands), strict=True):
        merged[index] = total.astype(jnp.result_type(merged[index]))
    return jax.tree.unflatten(structure, merged)


def counts(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
    """Returns the changed arrays that have no mean, by path; all replicas must agree in them."""
    return {path: new for (path, new), old in zip(
        tree_paths.named_leaves(after).items(), jax.tree.leaves(before), strict=True)
        if new is not old and not _is_averaged(new)}


def differences(values: dict[str, jax.Array], context: ReplicaContext) -> dict[str, jax.Array]:
    """Returns, by path, whether an array differs on any replica from the first replica."""
    if context.num_replicas_in_sync == 1:
        return {}
    first = context.from_first_replica(values)
    return {path: context.sum(jnp.any(value != first[path]).astype(jnp.float32)) > 0 for path, value in values.items()}


def refuse_differences(differs: dict[str, bool]) -> None:
    """Raises ValueError if replicas do not agree in some arrays, by path."""
    names = sorted(path for path, value in differs.items() if value)
    if names:
        raise ValueError(
            f"The model state {', '.join(map(repr, names))} is not the same on all replicas after "
            "`strategy.run`, and integers have no mean. Compute it from the rows of all replicas, with `context = "
            "trainer.distribute.get_replica_context()` and `context.all_reduce(\"sum\", (value * context.row_mask[:, "
            "None]).sum(0))`, of a value for each row and feature; or return it from the function, and use "
            "`strategy.reduce`.")
