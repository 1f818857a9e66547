"""Model state that replicas, or the microbatches of one, have changed: how their values become one value.

Owns the one rule. Without a declaration, floating-point arrays become their mean, weighted by real rows. Whatever the
kind of an array, one that a step leaves alone keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.core import tree_paths
from trainer.core.replica_context import ReplicaContext
from trainer.core.types import PyTree

Rules = tuple[tuple[str, str], ...]
"""Path patterns, each with "mean", "sum", "max" or "first"; the first that matches counts."""

REDUCE_INSIDE = (
    "Or let the module compute it from the rows of all replicas, with `context = trainer.distribute."
    "get_replica_context()`: `context.all_reduce(\"sum\", (value * context.row_mask[:, None]).sum(0))`, of a value for "
    "each row and feature, is the same on all replicas.")

SumOverReplicas = Callable[[list[jax.Array]], Sequence[jax.Array]]


def declared(rules: Rules, path: str) -> str | None:
    """Returns the reduction that is declared for the array of a path; None without any."""
    return next((name for pattern, name in rules if tree_paths.matches(pattern, path)), None)


def _reduction(rules: Rules, path: str, value: Any) -> str | None:
    return declared(rules, path) or ("mean" if jnp.issubdtype(jnp.result_type(value), jnp.inexact) else None)


def over_replicas(
    before: PyTree, after: PyTree, rules: Rules, context: ReplicaContext,
    sum_over_replicas: SumOverReplicas | None = None,
) -> Any:
    """Returns model state that is equal on all replicas.

    Arrays without a rule, such as counts, are those of the replica: they are known to be equal.

    Args:
      before: the state before the step.
      after: the state after it on this replica, of the same structure.
      rules: what is declared.
      context: the replica's context.
      sum_over_replicas: returns the sums of some arrays; by default by a reduction of its own.
    """
    if context.num_replicas_in_sync == 1:
        return after
    old, structure = jax.tree.flatten(before)
    merged = jax.tree.leaves(after)
    summands: dict[int, jax.Array] = {}
    starts: dict[int, jax.Array] = {}  # what a sum is added to
    for index, (path, new) in enumerate(tree_paths.named_leaves(after).items()):
        reduction = None if new is old[index] else _reduction(rules, path, new)
        if reduction == "mean":
            # A replica whose rows are all padding may have divided by their number.
            share = context.row_share
            summands[index] = new * share
            if context.is_padded:
                summands[index] = jnp.where(share > 0, summands[index], jnp.zeros_like(summands[index]))
        elif reduction == "sum":
            starts[index], summands[index] = old[index], new - old[index]
        elif reduction == "first":
            summands[index] = jnp.where(context.replica_id_in_sync_group == 0, new, jnp.zeros_like(new))
        elif reduction == "max":
            merged[index] = context.all_gather(new[None]).max(0)
    sums = (sum_over_replicas or context.sum)(list(summands.values()))
    for index, total in zip(summands, sums, strict=True):
        total = starts[index] + total if index in starts else total
        merged[index] = total.astype(jnp.result_type(merged[index]))
    return jax.tree.unflatten(structure, merged)


def over_parts(before: PyTree, parts: PyTree, changed: Sequence[bool], rules: Rules, weights: jax.Array) -> Any:
    """Returns the model state after microbatches, each of which began with the same state.

    Args:
      before: the state before.
      parts: the states after each, stacked.
      changed: for each array, whether they have changed it.
      rules: what is declared.
      weights: their real rows over all replicas, shape `(parts,)`.
    """
    share = weights / weights.sum()

    def merged(path: str, old: jax.Array, each: jax.Array) -> jax.Array:
        reduction = _reduction(rules, path, old)
        if reduction == "mean":
            value = (each * share.reshape(-1, *[1] * old.ndim)).sum(0)
        elif reduction == "sum":
            value = old + (each - old).sum(0)
        elif reduction == "max":
            value = each.max(0)
        else:  # those without a rule are equal
            value = each[0]
        return value.astype(old.dtype)

    old, structure = jax.tree.flatten(before)
    return jax.tree.unflatten(structure, [
        merged(path, leaf, each) if is_new else leaf
        for (path, leaf), each, is_new in zip(
            zip(tree_paths.named_leaves(before), old, strict=True), jax.tree.leaves(parts), changed, strict=True)])


def undeclared_counts(before: PyTree, after: PyTree, rules: Rules) -> dict[str, jax.Array]:
    """Returns the arrays that a step has changed and that have no rule, by path: all replicas must agree in them."""
    return {path: new for (path, new), old in zip(
        tree_paths.named_leaves(after).items(), jax.tree.leaves(before), strict=True)
        if new is not old and _reduction(rules, path, new) is None}


def differences(values: dict[str, jax.Array], context: ReplicaContext) -> dict[str, jax.Array]:
    """Returns, for arrays by path, whether any replica has other values than the first."""
    if context.num_replicas_in_sync == 1:
        return {}
    first = context.from_first_replica(values)
    return {path: context.sum(jnp.any(value != first[path]).astype(jnp.float32)) > 0 for path, value in values.items()}


def refuse_differences(differs: dict[str, bool]) -> None:
    """Raises ValueError if replicas do not agree in some arrays that have no reduction, by path."""
    names = sorted(path for path, value in differs.items() if value)
    if names:
        raise no_rule(names, "is not the same on all replicas after a step")


def no_rule(names: Sequence[str], what: str) -> ValueError:
    """Returns the error for arrays, by their paths, that have no reduction where one is needed."""
    return ValueError(
        f"The model state {', '.join(map(repr, names))} {what}, and there is no rule for what one device would have. "
        f"Declare how to combine the values: `compile(state_reduction={{{names[0]!r}: \"sum\"}})`, or \"mean\", "
        "\"max\" or \"first\". What rows add up to is a \"sum\", of which each replica adds what its own rows give. "
        f"{REDUCE_INSIDE} In a function of `strategy.run`, return it and use `strategy.reduce`.")
