"""Array functions shared by several metrics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trainer.core.types import ArrayLike
from trainer.losses.base import broadcast_sample_weight
from trainer.losses.shapes import as_float_pair


def divide_no_nan(numerator: Any, denominator: Any) -> jax.Array:
    """Returns the quotient, or 0 where the denominator is 0.

    >>> divide_no_nan(jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    is_zero = jnp.equal(denominator, 0)
    return jnp.where(is_zero, 0.0, numerator / jnp.where(is_zero, 1, denominator))


def full_weights(values: jax.Array, sample_weight: ArrayLike | None) -> jax.Array:
    """Returns the weights broadcast to the shape of `values`; ones if `sample_weight` is None.

    Args:
      values: `(n, ...)`.
      sample_weight: a scalar, or one weight per row or per value; see `broadcast_sample_weight`.
    """
    weights = broadcast_sample_weight(values, 1.0 if sample_weight is None else sample_weight)
    return jnp.broadcast_to(weights, values.shape)


# On an H100, up to about this many comparisons per value cost less than reading the value.
MAX_COMPARED_BUCKETS = 4096


def sums_by_bucket(values: jax.Array, buckets: jax.Array, number: int) -> jax.Array:
    """Returns the sum of the values in each bucket, for each column.

    On CPU this is a scatter, which is 200 times faster than comparing each value with 200 buckets. On other platforms
    the order of a scatter is not deterministic. There, up to `MAX_COMPARED_BUCKETS`, values are compared with every
    bucket in a fused reduction.

    Args:
      values: float32, `(n, columns)`.
      buckets: bucket of each value, integers in `[0, number)` of the same shape.
      number: number of buckets.

    Returns:
      Sums, `(number, columns)`.

    >>> sums_by_bucket(jnp.array([[1.0], [2.0], [4.0]]), jnp.array([[2], [0], [2]]), 3).ravel().tolist()
    [2.0, 0.0, 5.0]
    """
    if number > MAX_COMPARED_BUCKETS:
        return _scattered(values, buckets, jnp.arange(number))
    return jax.lax.platform_dependent(values, buckets, jnp.arange(number), cpu=_scattered, default=_compared)


def _scattered(values: jax.Array, buckets: jax.Array, numbers: jax.Array) -> jax.Array:
    columns = values.shape[1]
    cells = buckets * columns + jnp.arange(columns)
    sums = jax.ops.segment_sum(values.ravel(), cells.ravel(), numbers.size * columns)
    return sums.reshape(numbers.size, columns)


def _compared(values: jax.Array, buckets: jax.Array, numbers: jax.Array) -> jax.Array:
    is_in = buckets.T[None] == numbers[:, None, None]
    return jnp.where(is_in, values.T[None], 0.0).sum(axis=-1)


def as_table_pair(owner: str, y_true: ArrayLike, y_pred: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns labels and predictions as floats of shape `(n, outputs)`.

    Args:
      owner: name of the calling class, for the error message.
      y_true: labels.
      y_pred: predictions.

    Raises:
      ValueError: if the labels or predictions do not have rank 2.
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    check_table(owner, y_true, y_pred)
    return y_true, y_pred


def check_table(owner: str, y_true: jax.Array, y_pred: jax.Array) -> None:
    """Raises ValueError unless both labels and predictions have rank 2."""
    if len(y_true.shape) != 2 or len(y_pred.shape) != 2:
        advice = one_hot_advice(y_true, y_pred) or "Add the axis of outputs."
        raise ValueError(f"{owner} expects 2D inputs with shape (batch_size, output_dim). Received: y_true.shape="
                         f"{tuple(y_true.shape)}, y_pred.shape={tuple(y_pred.shape)}. {advice}")


def one_hot_advice(y_true: jax.Array | jax.ShapeDtypeStruct, y_pred: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Returns advice on labels that look like class indices if predictions have several classes; "" otherwise.

    >>> one_hot_advice(jnp.zeros(8, "int32"), jnp.zeros((8, 3)))
    'Labels that are class indices must be one-hot here: `trainer.utils.to_categorical(y, 3)`.'
    """
    rows, classes = y_pred.shape[:-1], y_pred.shape[-1:]
    if classes in ((), (1,)) or y_true.shape not in (rows, (*rows, 1)):
        return ""
    return f"Labels that are class indices must be one-hot here: `trainer.utils.to_categorical(y, {classes[0]})`."
