"""The maximum of one ratio subject to a minimum of another: sensitivity, specificity, precision and recall."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.metrics.confusion import COUNTS, ConfusionMetric, evenly_spaced_thresholds


class OperatingPointMetric(ConfusionMetric):
    """The base class of metrics at an operating point, with counts at evenly spaced thresholds.

    Args:
      argument: name of the argument for the minimum.
      value: the minimum, in [0, 1].
      num_thresholds: number of thresholds.
      class_id: see `ConfusionMetric`.
      name: see `Metric`.
      dtype: see `Metric`.

    Raises:
      ValueError: if `value` is outside [0, 1], or `num_thresholds` is below 1.
    """

    counts = COUNTS
    direction = "max"

    def __init__(
        self, argument: str, value: float, num_thresholds: int, class_id: int | None, name: str | None,
        dtype: DTypeLike | None,
    ):
        if not 0 <= value <= 1:
            raise ValueError(f"Argument `{argument}` must be in the range [0, 1]. Received: {argument}={value}")
        if num_thresholds < 1:
            raise ValueError(f"Argument `num_thresholds` must be an integer > 0. "
                             f"Received: num_thresholds={num_thresholds}")
        thresholds = [0.5] if num_thresholds == 1 else evenly_spaced_thresholds(num_thresholds)
        super().__init__(thresholds, class_id=class_id, name=name, dtype=dtype)
        self.value = value
        self.num_thresholds = num_thresholds
        setattr(self, argument, value)

    def best(self, dependent: jax.Array, constrained: jax.Array) -> jax.Array:
        """Returns the maximum of `dependent` where `constrained` reaches the minimum; 0 if it never does."""
        return jnp.max(jnp.where(constrained >= self.value, dependent, 0.0))

    def recalls(self) -> jax.Array:
        """Returns the recall (sensitivity) at each threshold: the share of true labels with positive predictions."""
        return self.ratio("true_positives", "false_negatives")

    def specificities(self) -> jax.Array:
        """Returns the specificity at each threshold: the share of false labels with negative predictions."""
        return self.ratio("true_negatives", "false_positives")

    def precisions(self) -> jax.Array:
        """Returns the precision at each threshold: the share of positive predictions whose labels are true."""
        return self.ratio("true_positives", "false_positives")


class SensitivityAtSpecificity(OperatingPointMetric):
    """The maximum sensitivity at a specificity of at least `specificity`; see `OperatingPointMetric`.

    >>> float(SensitivityAtSpecificity(0.5)([0, 0, 0, 1, 1], [0, 0.3, 0.8, 0.3, 0.8]))
    0.5
    """

    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__("specificity", specificity, num_thresholds, class_id, name, dtype)

    def result(self) -> jax.Array:
        return self.best(self.recalls(), self.specificities())


class SpecificityAtSensitivity(OperatingPointMetric):
    """The maximum specificity at a sensitivity of at least `sensitivity`; see `OperatingPointMetric`.

    >>> round(float(SpecificityAtSensitivity(0.5)([0, 0, 0, 1, 1], [0, 0.3, 0.8, 0.3, 0.8])), 4)
    0.6667
    """

    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__("sensitivity", sensitivity, num_thresholds, class_id, name, dtype)

    def result(self) -> jax.Array:
        return self.best(self.specificities(), self.recalls())


class PrecisionAtRecall(OperatingPointMetric):
    """The maximum precision at a recall of at least `recall`; see `OperatingPointMetric`.

    >>> float(PrecisionAtRecall(0.5)([0, 0, 0, 1, 1], [0, 0.3, 0.8, 0.3, 0.8]))
    0.5
    """

    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__("recall", recall, num_thresholds, class_id, name, dtype)

    def result(self) -> jax.Array:
        return self.best(self.precisions(), self.recalls())


class RecallAtPrecision(OperatingPointMetric):
    """The maximum recall at a precision of at least `precision`; see `OperatingPointMetric`.

    >>> float(RecallAtPrecision(0.8)([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]))
    0.5
    """

    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__("precision", precision, num_thresholds, class_id, name, dtype)

    def result(self) -> jax.Array:
        return self.best(self.recalls(), self.precisions())
