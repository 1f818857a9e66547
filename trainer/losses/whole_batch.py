"""Losses of a whole batch: overlaps that are summed over all rows, and distances between pairs of rows.

Each replica computes the loss from the rows of all replicas (see `loss_of_batch`), without rows that pad the batch.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.errors import wrong_type
from trainer.core.replica_context import get_replica_context
from trainer.core.types import ArrayLike
from trainer.losses.base import EPSILON, BuiltinLoss
from trainer.losses.shapes import as_float, as_float_pair, check_arrays, in_dtype, match_ranks

Axis = int | Sequence[int] | None


def dice(y_true: ArrayLike, y_pred: ArrayLike, axis: Axis = None) -> jax.Array:
    """Returns `1 - 2 * sum(y_true * y_pred) / (sum(y_true) + sum(y_pred) + 1e-7)`.

    Args:
      y_true: labels in [0, 1], of any shape.
      y_pred: predicted probabilities of the same shape.
      axis: axes of the sums; None sums over all axes and gives one number per batch.

    Raises:
      ValueError: if shapes differ.

    Source: Milletari et al., "V-Net: Fully Convolutional Neural Networks for Volumetric Medical Image Segmentation",
    2016, https://arxiv.org/abs/1606.04797.

    >>> round(dice([[1, 0]], [[0.5, 0.5]]).item(), 4)
    0.5
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    axes = _axes(axis)
    overlap = jnp.sum(y_true * y_pred, axes)
    return 1.0 - 2.0 * overlap / (jnp.sum(y_true, axes) + jnp.sum(y_pred, axes) + EPSILON)


@arguments.checked
def tversky(
    y_true: ArrayLike, y_pred: ArrayLike, alpha: float = 0.5, beta: float = 0.5, axis: Axis = None
) -> jax.Array:
    """Returns `1 - overlap / (overlap + alpha * sum(y_true * (1 - y_pred)) + beta * sum((1 - y_true) * y_pred))`.

    Args:
      y_true: labels in [0, 1], of any shape.
      y_pred: predicted probabilities of the same shape.
      alpha: weight of false negatives. (Keras's docstring says false positives, but its code weights false negatives.)
      beta: weight of false positives.
      axis: axes of the sums; None sums over all axes and gives one number per batch.

    Raises:
      ValueError: if shapes differ.

    Source: Salehi et al., "Tversky Loss Function for Image Segmentation Using 3D Fully Convolutional Deep Networks",
    2017, https://arxiv.org/abs/1706.05721.

    >>> round(tversky([[1, 0]], [[0.5, 0.5]]).item(), 4)
    0.5
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    axes = _axes(axis)
    overlap = jnp.sum(y_true * y_pred, axes)
    missed, found = jnp.sum(y_true * (1.0 - y_pred), axes), jnp.sum((1.0 - y_true) * y_pred, axes)
    return 1.0 - overlap / (overlap + alpha * missed + beta * found + EPSILON)


@arguments.checked
def circle(
    y_true: ArrayLike, y_pred: ArrayLike, ref_labels: ArrayLike | None = None, ref_embeddings: ArrayLike | None = None,
    remove_diagonal: bool = True, gamma: float = 80.0, margin: float = 0.4,
) -> jax.Array:
    """Returns the circle loss: small if embeddings are near their own class and far from other classes.

    Args:
      y_true: class indices, `(n,)` or `(n, 1)`.
      y_pred: embeddings of norm 1, `(n, features)`.
      ref_labels: class indices of the reference embeddings, `(m,)` or `(m, 1)`; `y_true` if None.
      ref_embeddings: reference embeddings to compare with, `(m, features)`; `y_pred` if None.
      remove_diagonal: whether to skip the comparison of row i with reference row i.
      gamma: scale factor.
      margin: radius of the decision boundary.

    Returns:
      One value per row, `(n,)`; 0 if no other row has its class, or if all rows have its class.

    Source: Sun et al., "Circle Loss: A Unified Perspective of Pair Similarity Optimization", 2020,
    https://arxiv.org/abs/2002.10857.

    >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
    >>> [round(value, 2) for value in circle([0, 0, 1], embeddings).tolist()]
    [0.0, 38.4, 0.0]
    """
    return _circle(y_true, y_pred, None, ref_labels, ref_embeddings, remove_diagonal, gamma, margin)


def _as_labels(what: str, labels: ArrayLike) -> jax.Array:
    return in_dtype(what, labels, None).astype(jnp.int32).reshape(-1)


def _circle(
    y_true: ArrayLike, y_pred: ArrayLike, mask: jax.Array | None, ref_labels: ArrayLike | None = None,
    ref_embeddings: ArrayLike | None = None, remove_diagonal: bool = True, gamma: float = 80.0, margin: float = 0.4,
) -> jax.Array:
    """Returns `circle` without the padding rows, whose loss is 0."""
    y_true, y_pred = _as_labels("`y_true`", y_true), as_float(y_pred)
    labels = y_true if ref_labels is None else _as_labels("`ref_labels`", ref_labels)
    is_same = y_true[:, None] == labels[None]
    is_other = ~is_same
    if remove_diagonal:
        is_same &= ~jnp.eye(is_same.shape[0], is_same.shape[1], dtype=bool)
    if mask is not None:
        is_pair = (mask[:, None] > 0) & (mask[None] > 0)
        is_same, is_other = is_same & is_pair, is_other & is_pair
    distances = jnp.maximum(1.0 - y_pred @ (y_pred if ref_embeddings is None else as_float(ref_embeddings)).T, 0.0)
    near = gamma * jnp.maximum(margin + distances, 0.0) * (distances - margin)
    far = gamma * jnp.maximum(1.0 + margin - distances, 0.0) * (1.0 - margin - distances)
    has_both = is_same.any(1) & is_other.any(1)
    total = _logsumexp(near, is_same) + _logsumexp(far, is_other)
    return jnp.where(has_both, jax.nn.softplus(total), 0.0)


def _logsumexp(values: jax.Array, is_counted: jax.Array) -> jax.Array:
    """Returns `log(sum(exp(values)))` over the counted values of axis 1; 0, without a gradient, if there are none."""
    has_any = is_counted.any(1, keepdims=True)
    return jax.nn.logsumexp(jnp.where(has_any, values, 0.0), axis=1, where=is_counted | ~has_any) * has_any[:, 0]


def _axes(axis: Axis) -> Any:
    axes = list(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else [] if axis is None else [axis]
    if not all(isinstance(each, numbers.Integral) and not isinstance(each, bool) for each in axes):
        raise wrong_type("axis", axis, "a whole number, a list of them, or None")
    return tuple(axes) if isinstance(axis, Sequence) else axis


class Overlap(BuiltinLoss):
    """The base class of losses of sums over a batch."""

    def __init__(self, axis: Axis, reduction: str | None, name: str | None, dtype: DTypeLike | None):
        super().__init__(reduction, name, dtype)
        _axes(axis)
        self.axis = axis

    @property
    def is_of_batch(self) -> bool:
        return self.axis is None or 0 in (self.axis if isinstance(self.axis, Sequence) else (self.axis,))

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        y_true, y_pred = match_ranks(y_true, y_pred)
        mask = get_replica_context().padding_mask if self.is_of_batch else None
        if mask is not None:  # zeros do not change the sums
            is_real = mask.reshape(-1, *[1] * (y_pred.ndim - 1)) > 0
            y_true, y_pred = jnp.where(is_real, y_true, 0), jnp.where(is_real, y_pred, 0)
        return self.function(y_true, y_pred, **self.arguments)


class Dice(Overlap):
    """One minus the Dice coefficient of labels and predictions; see `dice`, and `Loss` for the other arguments.

    With `axis=None` the loss is computed over the whole batch: sample weights and microbatches are not supported.

    >>> round(float(Dice()([[1, 0]], [[0.5, 0.5]])), 4)
    0.5
    """

    function = staticmethod(dice)
    parameters = ("axis",)

    def __init__(
        self, reduction: str | None = "sum_over_batch_size", name: str | None = None, axis: Axis = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(axis, reduction, name, dtype)


class Tversky(Overlap):
    """One minus the Tversky index of labels and predictions; see `tversky`, and `Dice` for the other arguments.

    >>> round(float(Tversky(alpha=1.0, beta=1.0)([[1, 0]], [[0.5, 0.5]])), 4)
    0.6667
    """

    function = staticmethod(tversky)
    parameters = ("alpha", "beta", "axis")

    def __init__(
        self, alpha: float = 0.5, beta: float = 0.5, reduction: str | None = "sum_over_batch_size",
        name: str | None = None, axis: Axis = None, dtype: DTypeLike | None = None,
    ):
        super().__init__(axis, reduction, name, dtype)
        self.alpha, self.beta = alpha, beta


class Circle(BuiltinLoss):
    """The circle loss of the embeddings of a batch; see `circle`, and `Loss` for the other arguments.

    A mean is over the rows whose loss is above 0, as in Keras.

    >>> round(float(Circle()([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])), 1)
    19.2
    """

    function = staticmethod(circle)
    parameters = ("gamma", "margin", "remove_diagonal")
    needs_vectors = True
    float_labels = ()
    is_of_batch = True

    def __init__(
        self, gamma: float = 80.0, margin: float = 0.4, remove_diagonal: bool = True,
        reduction: str | None = "sum_over_batch_size", name: str | None = None, dtype: DTypeLike | None = None,
    ):
        super().__init__(reduction, name, dtype)
        arguments.require_bool(remove_diagonal=remove_diagonal)
        self.gamma, self.margin, self.remove_diagonal = gamma, margin, remove_diagonal

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_arrays(y_true, y_pred)
        if len(y_pred.shape) != 2 or tuple(y_true.shape) not in ((y_pred.shape[0],), (y_pred.shape[0], 1)):
            raise ValueError("The loss 'circle' needs class indices of shape (batch,) and embeddings of shape (batch, "
                             f"features). Received: y_true.shape={tuple(y_true.shape)}, y_pred.shape="
                             f"{tuple(y_pred.shape)}.")

    def mask(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return self.call(y_true, y_pred) > 0

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return _circle(y_true, y_pred, get_replica_context().padding_mask, **self.arguments)
