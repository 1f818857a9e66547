"""Crossentropies that down-weight easy examples or tolerate wrong labels.

As in `probabilistic`, functions return one value per sample and clip probabilities to [1e-7, 1 - 1e-7].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.base import EPSILON, BuiltinLoss
from trainer.losses.probabilistic import DenseCrossentropy, log_probabilities
from trainer.losses.shapes import as_float, as_float_pair, check_arrays, check_class_indices, class_indices, in_dtype


@arguments.checked
def binary_focal_crossentropy(
    y_true: ArrayLike, y_pred: ArrayLike, apply_class_balancing: bool = False, alpha: float = 0.25, gamma: float = 2.0,
    from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1,
) -> jax.Array:
    """Returns the binary crossentropy times `(1 - p)**gamma`, averaged over `axis`.

    `p` is the predicted probability of the label. Easy examples therefore count less.

    Args:
      y_true: probabilities, mostly 0 or 1, `(n, ..., labels)`.
      y_pred: predictions of the same shape: probabilities or logits.
      apply_class_balancing: whether to weight labels of 1 by `alpha` and labels of 0 by `1 - alpha`.
      alpha: weight of the positive class, used if `apply_class_balancing`.
      gamma: focusing exponent.
      from_logits: whether `y_pred` holds logits.
      label_smoothing: amount of smoothing towards 0.5: 1 becomes `1 - label_smoothing / 2`.
      axis: axis of the mean.

    Returns:
      The shape of `y_pred` without `axis`.

    Raises:
      ValueError: if shapes differ.

    Source: Lin et al., "Focal Loss for Dense Object Detection", 2017, https://arxiv.org/abs/1708.02002.

    >>> round(binary_focal_crossentropy([[1]], [[0.5]]).item(), 4)
    0.1733
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    y_true = y_true * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        crossentropy = y_true * jax.nn.softplus(-y_pred) + (1.0 - y_true) * jax.nn.softplus(y_pred)
        y_pred = jax.nn.sigmoid(y_pred)
    else:
        clipped = jnp.clip(y_pred, EPSILON, 1.0 - EPSILON)
        crossentropy = -(y_true * jnp.log(clipped) + (1.0 - y_true) * jnp.log(1.0 - clipped))
    values = _power(1.0 - (y_true * y_pred + (1.0 - y_true) * (1.0 - y_pred)), gamma) * crossentropy
    if apply_class_balancing:
        values = values * (y_true * alpha + (1.0 - y_true) * (1.0 - alpha))
    return jnp.mean(values, axis=axis)


@arguments.checked
def categorical_focal_crossentropy(
    y_true: ArrayLike, y_pred: ArrayLike, alpha: ArrayLike = 0.25, gamma: float = 2.0, from_logits: bool = False,
    label_smoothing: float = 0.0, axis: int = -1,
) -> jax.Array:
    """Returns the crossentropy of one-hot labels and predictions, with each class weighted by `alpha * (1 - p)**gamma`.

    Args:
      y_true: distributions over classes, `(n, ..., classes)`.
      y_pred: predictions of the same shape: probabilities, which are normalized to a sum of 1, or logits.
      alpha: a scalar, or a weight for each class of the last axis.
      gamma: focusing exponent; `p` is the predicted probability.
      from_logits: whether `y_pred` holds logits.
      label_smoothing: share of each label to spread evenly over all classes of `axis`.
      axis: axis of classes.

    Returns:
      The shape of `y_pred` without `axis`.

    Raises:
      ValueError: if shapes differ.

    Source: Lin et al., "Focal Loss for Dense Object Detection", 2017, https://arxiv.org/abs/1708.02002.

    >>> round(categorical_focal_crossentropy([[0, 1]], [[0.5, 0.5]]).item(), 4)
    0.0433
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    y_true = y_true * (1.0 - label_smoothing) + label_smoothing / y_true.shape[axis]
    log_p = log_probabilities(y_pred, from_logits, axis)
    factors = in_dtype("`alpha`", alpha, None) * _power(1.0 - jnp.exp(log_p), gamma)
    return -jnp.sum(y_true * factors * log_p, axis=axis)


@arguments.checked
def categorical_generalized_cross_entropy(y_true: Any, y_pred: ArrayLike, q: float = 0.5) -> jax.Array:
    """Returns `(1 - p**q) / q`, where `p` is the predicted probability of the label's class.

    The loss is robust to wrong labels. As `q` approaches 0 it becomes the crossentropy; at 1 it is the mean absolute
    error.

    Args:
      y_true: class indices, `(n, ...)` or `(n, ..., 1)`.
      y_pred: predicted probabilities, `(n, ..., classes)`.
      q: above 0 and below 1.

    Returns:
      The shape of `y_pred` without its last axis.

    Raises:
      ValueError: if the shapes do not match.

    Source: Zhang and Sabuncu, "Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels",
    2018, https://arxiv.org/abs/1805.07836.

    >>> round(categorical_generalized_cross_entropy([1], [[0.75, 0.25]]).item(), 4)
    1.0
    """
    y_pred = as_float(y_pred)
    is_label = jax.nn.one_hot(class_indices(y_true, y_pred, -1), y_pred.shape[-1], dtype=y_pred.dtype)
    return (1.0 - _power(jnp.sum(y_pred * is_label, axis=-1), q)) / q


def _power(base: jax.Array, exponent: float) -> jax.Array:
    """Returns `base**exponent`, with a gradient of 0 where `base` is 0."""
    is_positive = base > 0
    return jnp.where(is_positive, jnp.where(is_positive, base, 1.0) ** exponent, 0.0 if exponent else 1.0)


class BinaryFocalCrossentropy(DenseCrossentropy):
    """The focal crossentropy of binary labels; see `binary_focal_crossentropy`, and `Loss` for other arguments.

    >>> round(float(BinaryFocalCrossentropy(from_logits=True)([[1]], [[0.0]])), 4)
    0.1733
    """

    function = staticmethod(binary_focal_crossentropy)
    parameters = ("apply_class_balancing", "alpha", "gamma", "from_logits", "label_smoothing", "axis")

    def __init__(
        self,
        apply_class_balancing: bool = False,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(from_logits, label_smoothing, axis, reduction, name, dtype)
        arguments.require_bool(apply_class_balancing=apply_class_balancing)
        self.apply_class_balancing, self.alpha, self.gamma = apply_class_balancing, alpha, gamma


class CategoricalFocalCrossentropy(DenseCrossentropy):
    """The focal crossentropy of one-hot labels; see `categorical_focal_crossentropy`, and `Loss` for other arguments.

    >>> round(float(CategoricalFocalCrossentropy(from_logits=True)([[0, 1]], [[0.0, 0.0]])), 4)
    0.0433
    """

    function = staticmethod(categorical_focal_crossentropy)
    parameters = ("alpha", "gamma", "from_logits", "label_smoothing", "axis")
    needs_vectors = True

    def __init__(
        self,
        alpha: ArrayLike = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(from_logits, label_smoothing, axis, reduction, name, dtype)
        in_dtype("`alpha`", alpha, None)
        self.alpha, self.gamma = alpha, gamma


class CategoricalGeneralizedCrossEntropy(BuiltinLoss):
    """A crossentropy that is robust to wrong labels; see `categorical_generalized_cross_entropy`, and `Loss`.

    Raises:
      ValueError: if `q` is not above 0 and below 1. When called, if the labels are not class indices.

    >>> round(float(CategoricalGeneralizedCrossEntropy()([1], [[0.75, 0.25]])), 4)
    1.0
    """

    function = staticmethod(categorical_generalized_cross_entropy)
    parameters = ("q",)
    needs_vectors = True
    sparse_labels = True

    def __init__(
        self, q: float = 0.5, reduction: str | None = "sum_over_batch_size", name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(reduction, name, dtype)
        if not 0 < q < 1:
            raise ValueError(f"`q` must be above 0 and below 1. Received: q={q!r}.")
        self.q = q

    @property
    def expects_probabilities(self) -> bool:
        return True

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_arrays(y_true, y_pred)
        self.check_rank(y_pred)
        check_class_indices(y_true, y_pred, -1)

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return self.function(y_true, y_pred, **self.arguments)
