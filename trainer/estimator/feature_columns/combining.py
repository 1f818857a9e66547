"""Combiners of table rows: mean, sum, or sum divided by the square root of the count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainer.estimator.feature_columns.base import IdsAndWeights

COMBINERS = ("mean", "sqrtn", "sum")


def combine_rows(
    table: jax.Array, which: IdsAndWeights, combiner: str, max_norm: float | None = None
) -> jax.Array:
    """Returns the combination of the rows with the given ids; zeros if there are none.

    Args:
      table: array of shape `(buckets, width)`.
      which: ids of shape `(..., values)`, negative for missing values, and their weights.
      combiner: "sum", the weighted sum; "mean", the weighted sum divided by the sum of the weights; "sqrtn", the
        weighted sum divided by the square root of the sum of squared weights. "mean" and "sqrtn" ignore weights of 0
        and less.
      max_norm: maximum L2 norm of a row; larger rows are scaled down first.

    Returns:
      An array of shape `(..., width)`.

    Example:
      >>> ids = jnp.array([[0, 1], [1, -1]])
      >>> combine_rows(jnp.array([[1.0], [3.0]]), IdsAndWeights(ids), "mean").tolist()
      [[2.0], [3.0]]
    """
    ids, given = which
    is_meant = ids >= 0
    if given is not None and combiner != "sum":
        is_meant &= given > 0
    weights = jnp.where(is_meant, 1.0 if given is None else given, 0.0)
    rows = table[jnp.maximum(ids, 0)]
    if max_norm is not None:
        rows = _clip_norms(rows, max_norm)
    total = jnp.sum(rows * weights[..., None].astype(rows.dtype), axis=-2)
    if combiner == "sum":
        return total
    divisor = jnp.sum(weights, -1) if combiner == "mean" else jnp.sqrt(_or_one(jnp.sum(jnp.square(weights), -1)))
    return total / _or_one(divisor)[..., None].astype(total.dtype)


def _clip_norms(rows: jax.Array, max_norm: float) -> jax.Array:
    norms = jnp.sqrt(_or_one(jnp.sum(jnp.square(rows), -1, keepdims=True)))
    return jnp.where(norms > max_norm, rows * (max_norm / norms), rows)


def _or_one(values: jax.Array) -> jax.Array:
    """Replaces 0 by 1, to avoid infinite quotients and gradients."""
    return jnp.where(values > 0, values, 1)
