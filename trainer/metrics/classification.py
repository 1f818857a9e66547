"""Mean losses of classifiers: crossentropies, divergences and hinge losses.

Values are equal to the loss of the same name.
"""

from __future__ import annotations

from jax.typing import DTypeLike

from trainer import losses
from trainer.metrics.reduction import LossMetric


class KLDivergence(LossMetric):
    """The mean Kullback-Leibler divergence of predicted distributions from the labels' distributions.

    >>> round(float(KLDivergence()([[1, 0]], [[0.5, 0.5]])), 4)
    0.6931
    """

    def __init__(self, name: str | None = "kl_divergence", dtype: DTypeLike | None = None):
        super().__init__(losses.KLDivergence(), name, dtype)


class Poisson(LossMetric):
    """The mean Poisson loss of counts and predicted rates.

    >>> round(float(Poisson()([[1, 0]], [[1, 2]])), 4)
    1.5
    """

    def __init__(self, name: str | None = "poisson", dtype: DTypeLike | None = None):
        super().__init__(losses.Poisson(), name, dtype)


class BinaryCrossentropy(LossMetric):
    """The mean crossentropy of binary labels.

    Args:
      name: see `Metric`.
      dtype: see `Metric`.
      from_logits: whether predictions are logits.
      label_smoothing: amount of smoothing of labels towards 0.5.

    >>> round(float(BinaryCrossentropy()([[1]], [[0.5]])), 4)
    0.6931
    """

    def __init__(
        self,
        name: str | None = "binary_crossentropy",
        dtype: DTypeLike | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
    ):
        super().__init__(losses.BinaryCrossentropy(from_logits, label_smoothing), name, dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing


class CategoricalCrossentropy(LossMetric):
    """The mean crossentropy of one-hot labels.

    Args:
      name: see `Metric`.
      dtype: see `Metric`.
      from_logits: whether predictions are logits.
      label_smoothing: share of each label to spread evenly over all classes of `axis`. (Keras divides it by the size
        of the last axis, for any `axis`.)
      axis: axis of classes.

    >>> round(float(CategoricalCrossentropy()([[0, 1]], [[0.5, 0.5]])), 4)
    0.6931
    """

    def __init__(
        self,
        name: str | None = "categorical_crossentropy",
        dtype: DTypeLike | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
        axis: int = -1,
    ):
        super().__init__(losses.CategoricalCrossentropy(from_logits, label_smoothing, axis), name, dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis


class SparseCategoricalCrossentropy(LossMetric):
    """The mean crossentropy of class indices.

    Args:
      name: see `Metric`.
      dtype: see `Metric`.
      from_logits: whether predictions are logits.
      ignore_class: a label whose samples are excluded, with or without sample weights. (Without weights, Keras counts
        them as 0.)
      axis: axis of classes in the predictions.

    >>> round(float(SparseCategoricalCrossentropy()([1], [[0.5, 0.5]])), 4)
    0.6931
    """

    def __init__(
        self,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: DTypeLike | None = None,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ):
        super().__init__(losses.SparseCategoricalCrossentropy(from_logits, ignore_class, axis=axis), name, dtype)
        self.from_logits = from_logits
        self.ignore_class = ignore_class
        self.axis = axis


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
    """The mean of `max(1 + highest score of the other classes - score of the true class, 0)`.

    >>> float(CategoricalHinge()([[0, 1]], [[0.5, 1.0]]))
    0.5
    """

    def __init__(self, name: str | None = "categorical_hinge", dtype: DTypeLike | None = None):
        super().__init__(losses.CategoricalHinge(), name, dtype)
