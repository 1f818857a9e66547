"""F-scores: weighted harmonic means of precision and recall."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.metrics.arrays import as_table_pair, check_table, divide_no_nan, full_weights
from trainer.metrics.base import Metric

AVERAGES = (None, "micro", "macro", "weighted")
# Keras's bound: if the largest score of a row is below it, such as in a row of zeros, no class is predicted.
SMALLEST_SCORE = 1e-9


def _number(argument: str, value: Any) -> float:
    try:
        return arguments.as_number(argument, value)
    except TypeError:
        raise TypeError(f"Invalid `{argument}` argument value. It should be a Python float. Received: "
                        f"{argument}={value} of type '{type(value)}'.") from None


class FBetaScore(Metric):
    """The F-beta score: `(1 + beta**2) * precision * recall / (beta**2 * precision + recall)` of each class.

    Args:
      average: None for one score per class, "micro" to count over all classes together, "macro" for the mean over
        classes, "weighted" for the mean over classes, weighted by their numbers of labels.
      beta: weight of recall relative to precision, a float above 0.
      threshold: scores above it predict their class, a float in (0, 1]; None predicts the class of the largest score.
      name: see `Metric`.
      dtype: see `Metric`.

    Raises:
      ValueError: if an argument is invalid. In updates, if the data is not `(n, classes)`.
      TypeError: if `beta` or `threshold` is not a number.

    >>> metric = FBetaScore(beta=2.0, threshold=0.5)
    >>> [round(score, 4) for score in metric([[1, 1], [1, 0]], [[0.2, 0.6], [0.7, 0.9]]).tolist()]
    [0.5556, 0.8333]
    """

    direction = "max"

    def __init__(
        self,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str | None = "fbeta_score",
        dtype: DTypeLike | None = None,
    ):
        if average not in AVERAGES:
            raise ValueError("Invalid `average` argument value. Expected one of: {None, 'micro', 'macro', 'weighted'}. "
                             f"Received: average={average}.")
        if _number("beta", beta) <= 0:
            raise ValueError(f"Invalid `beta` argument value. It should be > 0. Received: beta={beta}.")
        arguments.require_positive(beta=beta)
        if threshold is not None and not 0 < _number("threshold", threshold) <= 1:
            raise ValueError("Invalid `threshold` argument value. It should verify 0 < threshold <= 1. Received: "
                             f"threshold={threshold}.")
        super().__init__(dtype, name)
        self.average = average
        self.beta = beta
        self.threshold = threshold

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_table(type(self).__name__, y_true, y_pred)

    def build(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if not self._variables:
            self.validate(y_true, y_pred)
            shape = () if self.average == "micro" else (y_pred.shape[1],)
            self.true_positives = self.add_variable(shape, name="true_positives")
            self.false_positives = self.add_variable(shape, name="false_positives")
            self.false_negatives = self.add_variable(shape, name="false_negatives")
            self.intermediate_weights = self.add_variable(shape, name="intermediate_weights")

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Accumulates the counts of a batch.

        Args:
          y_true: 0 or 1, `(n, classes)`.
          y_pred: scores, `(n, classes)`.
          sample_weight: a scalar, or one weight per row or per value.

        Raises:
          ValueError: if the shapes are different from the above.
        """
        y_true, y_pred = as_table_pair(type(self).__name__, y_true, y_pred)
        self.build(y_true, y_pred)
        if self.threshold is None:
            is_largest = y_pred >= jnp.max(y_pred, axis=-1, keepdims=True)
            predicted = is_largest & (jnp.abs(y_pred) > SMALLEST_SCORE)
        else:
            predicted = y_pred > self.threshold
        weights = full_weights(y_true, sample_weight)
        axis = None if self.average == "micro" else 0
        self.true_positives.assign_add(jnp.sum(weights * y_true * predicted, axis=axis))
        self.false_positives.assign_add(jnp.sum(weights * (1.0 - y_true) * predicted, axis=axis))
        self.false_negatives.assign_add(jnp.sum(weights * y_true * ~predicted, axis=axis))
        self.intermediate_weights.assign_add(jnp.sum(weights * y_true, axis=axis))

    def result(self) -> jax.Array:
        """Returns the score: a scalar, or `(classes,)` if `average` is None; 0 where nothing was counted."""
        hits = (1.0 + self.beta**2) * self.true_positives.value
        errors = self.beta**2 * self.false_negatives.value + self.false_positives.value
        score = divide_no_nan(hits, hits + errors)
        if self.average == "weighted":
            support = self.intermediate_weights.value
            return divide_no_nan(jnp.sum(score * support), jnp.sum(support))
        return score if self.average is None else jnp.mean(score)


class F1Score(FBetaScore):
    """The harmonic mean of precision and recall: `FBetaScore` with `beta=1`.

    >>> round(float(F1Score(average="micro", threshold=0.5)([[1, 1], [1, 0]], [[0.2, 0.6], [0.7, 0.9]])), 4)
    0.6667
    """

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str | None = "f1_score",
        dtype: DTypeLike | None = None,
    ):
        super().__init__(average, 1.0, threshold, name, dtype)
