"""Means of the losses of maximum-margin classifiers; the numbers are those of the loss of that name."""

from __future__ import annotations

from jax.typing import DTypeLike

from trainer import losses
from trainer.metrics.reduction import LossMetric


class Hinge(LossMetric):
    """The mean of `max(1 - y_true * y_pred, 0)`.

    >>> float(Hinge()([[-1, 1]], [[0.5, 2]]))
    0.75
    """

    def __init__(self, name: str | None = "hinge", dtype: DTypeLike | None = None):
        super().__init__(losses.Hinge(), name, dtype)


class SquaredHinge(LossMetric):
    """The mean of `max(1 - y_true * y_pred, 0)**2`.

    >>> float(SquaredHinge()([[-1, 1]], [[0.5, 2]]))
    1.125
    """

    def __init__(self, name: str | None = "squared_hinge", dtype: DTypeLike | None = None):
        super().__init__(losses.SquaredHinge(), name, dtype)


class CategoricalHinge(LossMetric):
    """The mean of by how much the best wrong class comes within 1 of the right class, or exceeds it.

    >>> float(CategoricalHinge()([[0, 1]], [[0.5, 1.0]]))
    0.5
    """

    def __init__(self, name: str | None = "categorical_hinge", dtype: DTypeLike | None = None):
        super().__init__(losses.CategoricalHinge(), name, dtype)
