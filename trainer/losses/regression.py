"""Losses between real numbers: squared, absolute and relative errors, their robust forms, and cosine similarity.

Each loss is a function that returns one value per sample and a class that adds a reduction. Functions take labels and
predictions, arrays or lists `(n, ..., features)` of any dtype, and return `(n, ...)`, float32 or wider. They raise
ValueError if the shapes differ by more than a last axis of size 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.base import EPSILON, BuiltinLoss
from trainer.losses.shapes import as_float_pair


def mean_squared_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean((y_true - y_pred)**2, axis=-1)`.

    >>> mean_squared_error([[0, 1]], [[1, 3]]).tolist()
    [2.5]
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    return jnp.mean(jnp.square(y_pred - y_true), axis=-1)


def mean_absolute_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean(abs(y_true - y_pred), axis=-1)`.

    >>> mean_absolute_error([[0, 1]], [[1, 3]]).tolist()
    [1.5]
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    return jnp.mean(jnp.abs(y_pred - y_true), axis=-1)


def mean_absolute_percentage_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `100 * mean(abs(y_true - y_pred) / max(abs(y_true), 1e-7), axis=-1)`.

    >>> mean_absolute_percentage_error([[2, 4]], [[1, 4]]).tolist()
    [25.0]
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    return 100.0 * jnp.mean(jnp.abs(y_pred - y_true) / jnp.maximum(jnp.abs(y_true), EPSILON), axis=-1)


def mean_squared_logarithmic_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean((log(1 + y_true) - log(1 + y_pred))**2, axis=-1)`, with inputs clipped to at least 1e-7.

    >>> round(mean_squared_logarithmic_error([[0, 1]], [[1, 1]]).item(), 4)
    0.2402
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    log_true = jnp.log(jnp.maximum(y_true, EPSILON) + 1.0)
    log_pred = jnp.log(jnp.maximum(y_pred, EPSILON) + 1.0)
    return jnp.mean(jnp.square(log_pred - log_true), axis=-1)


@arguments.checked
def huber(y_true: ArrayLike, y_pred: ArrayLike, delta: float = 1.0) -> jax.Array:
    """Returns the Huber loss: `error**2 / 2` for errors up to `delta`, linear above, averaged over the last axis.

    Args:
      y_true: labels.
      y_pred: predictions.
      delta: error at which the loss becomes linear.

    Source: Huber, "Robust Estimation of a Location Parameter", 1964.

    >>> huber([[0, 0]], [[0.5, 3]]).tolist()
    [1.3125]
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    error = jnp.abs(y_pred - y_true)
    return jnp.mean(jnp.where(error <= delta, 0.5 * jnp.square(error), delta * (error - 0.5 * delta)), axis=-1)


def log_cosh(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns `mean(log(cosh(y_pred - y_true)), axis=-1)`: quadratic for small errors, linear for large errors.

    >>> round(log_cosh([[0, 0]], [[0, 1000]]).item(), 3)
    499.653
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    error = y_pred - y_true
    # cosh overflows at an error of 90; logaddexp never does.
    return jnp.mean(jnp.logaddexp(error, -error) - jnp.log(2.0), axis=-1)


@arguments.checked
def cosine_similarity(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns the negative cosine similarity of labels and predictions: -1 if they have the same direction.

    Args:
      y_true: labels.
      y_pred: predictions.
      axis: axis of the vectors. The similarity of a vector of zeros is 0.

    >>> cosine_similarity([[0, 2]], [[0, 3]]).tolist()
    [-1.0]
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    return -jnp.sum(_unit_vectors(y_true, axis) * _unit_vectors(y_pred, axis), axis=axis)


def _unit_vectors(vectors: jax.Array, axis: int) -> jax.Array:
    # The bound is inside the root, because the gradient of the root is infinite at 0.
    squared_norm = jnp.sum(jnp.square(vectors), axis=axis, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squared_norm, EPSILON**2))


class MeanSquaredError(BuiltinLoss):
    """The mean squared error; see `mean_squared_error`, and `Loss` for the arguments.

    >>> float(MeanSquaredError()([[0, 1]], [[1, 3]]))
    2.5
    """

    function = staticmethod(mean_squared_error)
    aliases = ("mse", "MSE")


class MeanAbsoluteError(BuiltinLoss):
    """The mean absolute error; see `mean_absolute_error`, and `Loss` for the arguments.

    >>> float(MeanAbsoluteError()([[0, 1]], [[1, 3]]))
    1.5
    """

    function = staticmethod(mean_absolute_error)
    aliases = ("mae", "MAE")


class MeanAbsolutePercentageError(BuiltinLoss):
    """The mean absolute error in percent of the label; see `mean_absolute_percentage_error`, and `Loss`.

    >>> float(MeanAbsolutePercentageError()([[2, 4]], [[1, 4]]))
    25.0
    """

    function = staticmethod(mean_absolute_percentage_error)
    aliases = ("mape", "MAPE")


class MeanSquaredLogarithmicError(BuiltinLoss):
    """The mean squared error of logarithms; see `mean_squared_logarithmic_error`, and `Loss` for the arguments.

    >>> round(float(MeanSquaredLogarithmicError()([[0, 1]], [[1, 1]])), 4)
    0.2402
    """

    function = staticmethod(mean_squared_logarithmic_error)
    aliases = ("msle", "MSLE")


class Huber(BuiltinLoss):
    """The Huber loss, quadratic up to `delta` and linear above; see `huber`, and `Loss` for the other arguments.

    Raises:
      TypeError: if `delta` is not a number.
      ValueError: if `delta` is not above 0.

    >>> float(Huber(delta=2.0)([[0, 0]], [[1, 4]]))
    3.25
    """

    function = staticmethod(huber)
    parameters = ("delta",)

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "huber_loss",
        dtype: DTypeLike | None = None,
    ):
        super().__init__(reduction, name, dtype)
        arguments.require_positive(delta=delta)
        self.delta = delta


class LogCosh(BuiltinLoss):
    """The logarithm of the hyperbolic cosine of the errors; see `log_cosh`, and `Loss` for the arguments.

    >>> round(float(LogCosh()([[0, 0]], [[0, 1000]])), 3)
    499.653
    """

    function = staticmethod(log_cosh)


class CosineSimilarity(BuiltinLoss):
    """The negative cosine similarity; see `cosine_similarity`, and `Loss` for the other arguments.

    >>> float(CosineSimilarity()([[0, 2], [1, 0]], [[0, 3], [0, 1]]))
    -0.5
    """

    function = staticmethod(cosine_similarity)
    parameters = ("axis",)
    needs_vectors = True

    def __init__(
        self,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(reduction, name, dtype)
        self.axis = axis
