"""Losses between probability distributions: crossentropies, Kullback-Leibler divergence, Poisson.

Functions take labels and predictions, arrays or lists of any dtype, and return one value per sample, float32 or wider.
With `from_logits=False`, Keras's default, predictions are probabilities, clipped to [1e-7, 1 - 1e-7].
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_index

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.base import EPSILON, BuiltinLoss
from trainer.losses.linear_logits import LinearLogits
from trainer.losses.shapes import (
    as_float,
    as_float_pair,
    check_arrays,
    check_class_indices,
    check_same_shape,
    class_indices,
)


@arguments.checked
def binary_crossentropy(
    y_true: ArrayLike, y_pred: ArrayLike, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> jax.Array:
    """Returns the binary crossentropy, averaged over `axis`.

    Args:
      y_true: probabilities, mostly 0 or 1, `(n, ..., labels)`.
      y_pred: predictions of the same shape: probabilities or logits.
      from_logits: whether `y_pred` holds logits.
      label_smoothing: amount of smoothing towards 0.5: 1 becomes `1 - label_smoothing / 2`.
      axis: axis of the mean.

    Returns:
      The shape of `y_pred` without `axis`.

    Raises:
      ValueError: if shapes differ.

    >>> round(binary_crossentropy([[1]], [[0.5]]).item(), 4)
    0.6931
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    y_true = y_true * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        values = y_true * jax.nn.softplus(-y_pred) + (1.0 - y_true) * jax.nn.softplus(y_pred)
    else:
        y_pred = jnp.clip(y_pred, EPSILON, 1.0 - EPSILON)
        values = -(y_true * jnp.log(y_pred) + (1.0 - y_true) * jnp.log(1.0 - y_pred))
    return jnp.mean(values, axis=axis)


@arguments.checked
def categorical_crossentropy(
    y_true: ArrayLike, y_pred: ArrayLike, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> jax.Array:
    """Returns the crossentropy of predictions and one-hot labels or other distributions.

    Args:
      y_true: distributions over classes, `(n, ..., classes)`.
      y_pred: predictions of the same shape: probabilities, which are normalized to a sum of 1, or logits.
      from_logits: whether `y_pred` holds logits.
      label_smoothing: share of each label to spread evenly over all classes of `axis`. (Keras divides it by the size
        of the last axis, for any `axis`.)
      axis: axis of classes.

    Returns:
      The shape of `y_pred` without `axis`.

    Raises:
      ValueError: if shapes differ.

    Source: for the smoothing, Szegedy et al., "Rethinking the Inception Architecture", 2015,
    https://arxiv.org/abs/1512.00567.

    >>> round(categorical_crossentropy([[0, 1]], [[0.5, 0.5]]).item(), 4)
    0.6931
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    y_true = y_true * (1.0 - label_smoothing) + label_smoothing / y_true.shape[axis]
    return -jnp.sum(y_true * log_probabilities(y_pred, from_logits, axis), axis=axis)


@arguments.checked
def sparse_categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, ignore_class: int | None = None, axis: int = -1
) -> jax.Array:
    """Returns the crossentropy of class indices and predictions.

    Args:
      y_true: class indices, `(n, ...)` or with size 1 at `axis`. As in Keras, an index outside the classes costs 0.
      y_pred: predictions, `(n, ..., classes)`: probabilities, which are normalized to a sum of 1, or logits.
      from_logits: whether `y_pred` holds logits.
      ignore_class: a label that costs 0, such as -1 or 255 for unlabeled pixels.
      axis: axis of classes in `y_pred`.

    Returns:
      The shape of `y_pred` without `axis`.

    Raises:
      ValueError: if the shapes do not match, for example with one-hot labels.

    >>> round(sparse_categorical_crossentropy([1], [[0.5, 0.5]]).item(), 4)
    0.6931
    """
    y_pred = as_float(y_pred)
    labels = class_indices(y_true, y_pred, axis)
    is_label = jax.nn.one_hot(labels, y_pred.shape[axis], axis=axis, dtype=bool)
    # Select instead of multiplying: a logit of -inf, for an impossible class, would turn 0 into NaN.
    values = -jnp.sum(jnp.where(is_label, log_probabilities(y_pred, from_logits, axis), 0.0), axis=axis)
    return values if ignore_class is None else jnp.where(labels == ignore_class, 0.0, values)


def kl_divergence(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `sum(y_true * log(y_true / y_pred), axis=-1)`, with both clipped to [1e-7, 1].

    Args:
      y_true: distributions, `(n, ..., classes)`.
      y_pred: predicted distributions of the same shape.

    Raises:
      ValueError: if shapes differ.

    Source: Kullback and Leibler, "On Information and Sufficiency", 1951.

    >>> round(kl_divergence([[1, 0]], [[0.5, 0.5]]).item(), 4)
    0.6931
    """
    y_true, y_pred = (jnp.clip(values, EPSILON, 1.0) for values in as_float_pair(y_true, y_pred))
    return jnp.sum(y_true * jnp.log(y_true / y_pred), axis=-1)


def poisson(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean(y_pred - y_true * log(y_pred + 1e-7), axis=-1)`.

    Args:
      y_true: counts, `(n, ..., features)`.
      y_pred: predicted rates of the same shape, not negative.

    Raises:
      ValueError: if shapes differ.

    >>> round(poisson([[1, 0]], [[1, 2]]).item(), 4)
    1.5
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    return jnp.mean(y_pred - y_true * jnp.log(y_pred + EPSILON), axis=-1)


def log_probabilities(y_pred: jax.Array, from_logits: bool, axis: int) -> jax.Array:
    """Returns the log-probabilities of predictions: logits, or probabilities that are normalized over `axis`."""
    if from_logits:
        return jax.nn.log_softmax(y_pred, axis=axis)
    total = jnp.sum(y_pred, axis=axis, keepdims=True)
    # A row of zeros, such as a padded row, is not a distribution: it is not normalized, but clipped like any other.
    probabilities = y_pred / jnp.where(total == 0, 1.0, total)
    return jnp.log(jnp.clip(probabilities, EPSILON, 1.0 - EPSILON))


class Crossentropy(BuiltinLoss):
    """The base class of crossentropies.

    Args:
      from_logits: whether `y_pred` holds logits.
      reduction: see `Loss`.
      name: see `BuiltinLoss`.
      dtype: see `Loss`.

    Raises:
      TypeError: if `from_logits` is not a bool.
    """

    def __init__(self, from_logits: bool, reduction: str | None, name: str | None, dtype: DTypeLike | None):
        super().__init__(reduction, name, dtype)
        arguments.require_bool(from_logits=from_logits)
        self.from_logits = from_logits

    @property
    def expects_probabilities(self) -> bool:
        return not self.from_logits


class DenseCrossentropy(Crossentropy):
    """The base class of crossentropies of labels that have the shape of the predictions.

    Raises:
      TypeError: if `from_logits` is not a bool or `label_smoothing` is not a number.
      ValueError: if `label_smoothing` is not in [0, 1].
    """

    parameters: ClassVar[tuple[str, ...]] = ("from_logits", "label_smoothing", "axis")

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(from_logits, reduction, name, dtype)
        arguments.require_share(label_smoothing=label_smoothing)
        self.label_smoothing = label_smoothing
        self.axis = axis

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_arrays(y_true, y_pred)
        check_same_shape(y_true, y_pred, "For labels that are class indices use SparseCategoricalCrossentropy; "
                                         "otherwise give one label for each number of `y_pred`.")
        self.check_rank(y_pred)


class BinaryCrossentropy(DenseCrossentropy):
    """The crossentropy of binary labels; see `binary_crossentropy`, and `Loss` for the other arguments.

    >>> round(float(BinaryCrossentropy(from_logits=True)([[1]], [[0.0]])), 4)
    0.6931
    """

    function = staticmethod(binary_crossentropy)
    aliases = ("bce", "BCE")


class CategoricalCrossentropy(DenseCrossentropy):
    """The crossentropy of one-hot labels; see `categorical_crossentropy`, and `Loss` for the other arguments.

    Raises:
      ValueError: when called, also if there is a single class, because the loss would always be 0.

    >>> round(float(CategoricalCrossentropy(from_logits=True)([[0, 1]], [[0.0, 0.0]])), 4)
    0.6931
    """

    function = staticmethod(categorical_crossentropy)
    needs_vectors = True

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        super().validate(y_true, y_pred)
        if y_pred.shape[normalize_axis_index(self.axis, len(y_pred.shape))] == 1:
            raise ValueError(f"`y_pred` must have more than one class on axis {self.axis}. Received: y_pred.shape="
                             f"{tuple(y_pred.shape)}. For one yes-or-no output use BinaryCrossentropy.")


class SparseCategoricalCrossentropy(Crossentropy):
    """The crossentropy of class indices; see `sparse_categorical_crossentropy`, and `Loss` for the other arguments.

    Samples of the class `ignore_class` are excluded, also from the divisor of a mean.

    Raises:
      ValueError: when called, if the labels are one-hot or not integers.

    >>> round(float(SparseCategoricalCrossentropy(from_logits=True)([1, 0], [[0.0, 0.0], [0.0, 0.0]])), 4)
    0.6931
    """

    function = staticmethod(sparse_categorical_crossentropy)
    parameters = ("from_logits", "ignore_class", "axis")
    needs_vectors = True
    sparse_labels = True

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(from_logits, reduction, name, dtype)
        self.ignore_class = ignore_class
        self.axis = axis

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_arrays(y_true, y_pred)
        self.check_rank(y_pred)
        check_class_indices(y_true, y_pred, self.axis)
        if not jnp.issubdtype(y_true.dtype, jnp.integer):
            raise ValueError(f"`y_true` must hold class indices of an integer dtype. Received: y_true.shape="
                             f"{tuple(y_true.shape)} of dtype {y_true.dtype}, y_pred.shape={tuple(y_pred.shape)}. "
                             f"Give `y_true.astype(\"int32\")`.")

    def mask(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array | None:
        if self.ignore_class is None:
            return None
        return class_indices(y_true, y_pred, self.axis) != self.ignore_class

    @property
    def takes_linear_logits(self) -> bool:
        return self.from_logits and self.axis == -1

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        if isinstance(y_pred, LinearLogits):
            labels = class_indices(y_true, y_pred, self.axis)
            return y_pred.map_chunks(lambda part, logits: self.function(part, logits, **self.arguments), labels)
        return self.function(y_true, y_pred, **self.arguments)


class KLDivergence(BuiltinLoss):
    """The Kullback-Leibler divergence of distributions; see `kl_divergence`, and `Loss` for the arguments.

    >>> round(float(KLDivergence()([[1, 0]], [[0.5, 0.5]])), 4)
    0.6931
    """

    function = staticmethod(kl_divergence)
    aliases = ("kld", "KLD")
    needs_vectors = True


class Poisson(BuiltinLoss):
    """The Poisson loss of counts and predicted rates; see `poisson`, and `Loss` for the arguments.

    >>> round(float(Poisson()([[1, 0]], [[1, 2]])), 4)
    1.5
    """

    function = staticmethod(poisson)
