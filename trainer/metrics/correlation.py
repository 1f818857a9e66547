"""Correlations between labels and predictions along an axis, averaged over rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_float_pair, check_same_shape
from trainer.metrics.arrays import divide_no_nan
from trainer.metrics.reduction import MeanMetricWrapper


def pearson_correlation(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns the covariance over `axis` divided by both standard deviations; 0 if a standard deviation is 0.

    Raises:
      ValueError: if shapes differ.

    >>> pearson_correlation([[0.0, 1.0]], [[3.0, 5.0]]).tolist()
    [1.0]
    """
    true_errors, pred_errors = (values - jnp.mean(values, axis=axis, keepdims=True)
                                for values in as_float_pair(y_true, y_pred))
    covariance = jnp.mean(true_errors * pred_errors, axis=axis)
    return divide_no_nan(covariance, jnp.std(true_errors, axis=axis) * jnp.std(pred_errors, axis=axis))


def concordance_correlation(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns Lin's concordance: Pearson's correlation, reduced by differences in mean and variance; 0 for constants.

    Raises:
      ValueError: if shapes differ.

    Source: Lin, "A Concordance Correlation Coefficient to Evaluate Reproducibility", 1989.

    >>> round(concordance_correlation([[0.0, 2.0]], [[1.0, 3.0]]).item(), 4)
    0.6667
    """
    y_true, y_pred = as_float_pair(y_true, y_pred)
    true_mean, pred_mean = jnp.mean(y_true, axis=axis, keepdims=True), jnp.mean(y_pred, axis=axis, keepdims=True)
    covariance = jnp.mean((y_true - true_mean) * (y_pred - pred_mean), axis=axis)
    spread = jnp.var(y_true, axis=axis) + jnp.var(y_pred, axis=axis)
    return divide_no_nan(2.0 * covariance, spread + jnp.square(true_mean - pred_mean).squeeze(axis))


class Correlation(MeanMetricWrapper):
    """The base class of correlations: checks shapes."""

    direction = "max"

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred)


class PearsonCorrelation(Correlation):
    """The mean of `pearson_correlation`.

    >>> float(PearsonCorrelation()([[0.0, 1.0]], [[3.0, 5.0]]))
    1.0
    """

    def __init__(self, name: str | None = "pearson_correlation", dtype: DTypeLike | None = None, axis: int = -1):
        super().__init__(pearson_correlation, name, dtype, axis=axis)
        self.axis = axis


class ConcordanceCorrelation(Correlation):
    """The mean of `concordance_correlation`.

    >>> round(float(ConcordanceCorrelation()([[0.0, 2.0]], [[1.0, 3.0]])), 4)
    0.6667
    """

    def __init__(self, name: str | None = "concordance_correlation", dtype: DTypeLike | None = None, axis: int = -1):
        super().__init__(concordance_correlation, name, dtype, axis=axis)
        self.axis = axis
