"""Metrics of heads: metrics over logits, with TensorFlow's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trainer.core.types import ArrayLike
from trainer.metrics import AUC, BinaryAccuracy, Precision, Recall
from trainer.metrics.reduction import WeightedMean

Part = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _whole(labels: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return labels, logits


class HeadMetric:
    """Mixin for the metrics of heads.

    Attributes:
      part: function that selects the labels and logits of a head from the labels and logits of all heads; assignable.
    """

    part: Part = staticmethod(_whole)


class MeanOf(HeadMetric, WeightedMean):
    """Weighted mean of a function of labels and logits, with one or more values per row.

    Args:
      function: function `(labels, logits)`.
      name: name of the metric.
    """

    def __init__(self, function: Callable[[jax.Array, jax.Array], jax.Array], name: str):
        super().__init__(name)
        self._function = function

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds the values of the function."""
        self.add_values(self._function(*self.part(jnp.asarray(y_true), jnp.asarray(y_pred))), sample_weight)


class AccuracyBaseline(MeanOf):
    """Accuracy of always predicting the more frequent of two classes."""

    def __init__(self, name: str):
        super().__init__(lambda labels, logits: labels.astype(jnp.float32), name)

    def result(self) -> jax.Array:
        mean = super().result()
        return jnp.maximum(mean, 1 - mean)


class _OfProbabilities(HeadMetric):
    """Mixin that lets a metric of probabilities accept logits."""

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds labels, and the probabilities of logits."""
        labels, logits = self.part(jnp.asarray(y_true), jnp.asarray(y_pred))
        super().update_state(labels, jax.nn.sigmoid(logits), sample_weight)  # type: ignore[misc]


class LogitsAUC(HeadMetric, AUC):
    """`AUC` of logits.

    Args:
      name: name of the metric.
      curve: "ROC" or "PR".
    """

    def __init__(self, name: str, curve: str = "ROC"):
        super().__init__(name=name, curve=curve, from_logits=True)

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Adds labels and logits."""
        super().update_state(*self.part(jnp.asarray(y_true), jnp.asarray(y_pred)), sample_weight)


class LogitsPrecision(_OfProbabilities, Precision):
    """`Precision` of logits."""


class LogitsRecall(_OfProbabilities, Recall):
    """`Recall` of logits."""


class LogitsAccuracy(_OfProbabilities, BinaryAccuracy):
    """`BinaryAccuracy` of logits."""


def at_thresholds(thresholds: tuple[float, ...], key: Callable[[str], str]) -> list[Any]:
    """Returns accuracy, precision and recall at each threshold of the probability."""
    found: list[Any] = []
    for threshold in thresholds:
        found += [
            LogitsAccuracy(name=key(f"accuracy/positive_threshold_{threshold:g}"), threshold=threshold),
            LogitsPrecision(name=key(f"precision/positive_threshold_{threshold:g}"), thresholds=threshold),
            LogitsRecall(name=key(f"recall/positive_threshold_{threshold:g}"), thresholds=threshold)]
    return found


