"""Means of errors between real numbers, and the cosine similarity.

Each metric takes labels and predictions of the same shape `(n, ..., features)`. Values are equal to the loss of the
same name, except for `CosineSimilarity`, which has the opposite sign.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer import losses
from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_float_pair, check_same_shape
from trainer.metrics.reduction import LossMetric, MeanMetricWrapper


class MeanSquaredError(LossMetric):
    """The mean squared error.

    >>> float(MeanSquaredError()([[0, 1]], [[1, 3]]))
    2.5
    """

    def __init__(self, name: str | None = "mean_squared_error", dtype: DTypeLike | None = None):
        super().__init__(losses.MeanSquaredError(), name, dtype)


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean squared error over all updates.

    >>> float(RootMeanSquaredError()([[0, 0]], [[3, 3]]))
    3.0
    """

    def __init__(self, name: str | None = "root_mean_squared_error", dtype: DTypeLike | None = None):
        super().__init__(name, dtype)

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds the squared errors to the mean.

        Args:
          y_true: labels, rows first.
          y_pred: predictions, rows first.
          sample_weight: a scalar, or one weight per row or, unlike in the other metrics here, per number.

        Raises:
          ValueError: if the shapes do not match.
        """
        y_true, y_pred = as_float_pair(y_true, y_pred)
        self.validate(y_true, y_pred)
        self.add_values(jnp.square(y_pred - y_true), sample_weight)

    def result(self) -> jax.Array:
        return jnp.sqrt(super().result())


class MeanAbsoluteError(LossMetric):
    """The mean absolute error.

    >>> float(MeanAbsoluteError()([[0, 1]], [[1, 3]]))
    1.5
    """

    def __init__(self, name: str | None = "mean_absolute_error", dtype: DTypeLike | None = None):
        super().__init__(losses.MeanAbsoluteError(), name, dtype)


class MeanAbsolutePercentageError(LossMetric):
    """The mean absolute error in percent of the labels.

    >>> float(MeanAbsolutePercentageError()([[2, 4]], [[1, 4]]))
    25.0
    """

    def __init__(self, name: str | None = "mean_absolute_percentage_error", dtype: DTypeLike | None = None):
        super().__init__(losses.MeanAbsolutePercentageError(), name, dtype)


class MeanSquaredLogarithmicError(LossMetric):
    """The mean squared difference of `log(1 + value)`.

    >>> round(float(MeanSquaredLogarithmicError()([[0, 1]], [[1, 1]])), 4)
    0.2402
    """

    def __init__(self, name: str | None = "mean_squared_logarithmic_error", dtype: DTypeLike | None = None):
        super().__init__(losses.MeanSquaredLogarithmicError(), name, dtype)


class LogCoshError(LossMetric):
    """The mean of `log(cosh(error))`.

    >>> round(float(LogCoshError()([[0, 0]], [[0, 1000]])), 3)
    499.653
    """

    def __init__(self, name: str | None = "logcosh", dtype: DTypeLike | None = None):
        super().__init__(losses.LogCosh(), name, dtype)


def _cosine(y_true: jax.Array, y_pred: jax.Array, axis: int) -> jax.Array:
    # The loss is the negative cosine, so that training aligns the directions.
    return -losses.cosine_similarity(y_true, y_pred, axis=axis)


class CosineSimilarity(MeanMetricWrapper):
    """The mean cosine similarity of labels and predictions: 1 if their directions are equal.

    >>> float(CosineSimilarity()([[0, 2], [1, 0]], [[0, 3], [0, 1]]))
    0.5
    """

    direction = "max"

    def __init__(self, name: str | None = "cosine_similarity", dtype: DTypeLike | None = None, axis: int = -1):
        super().__init__(_cosine, name, dtype, axis=axis)
        self.axis = axis

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred)
