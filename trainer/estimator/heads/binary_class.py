"""The head for binary classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.core.types import PyTree
from trainer.estimator.heads.base import (
    Head,
    LossFn,
    LossReduction,
    WeightColumn,
    as_column,
    checked_thresholds,
    checked_vocabulary,
    class_ids,
    names_of_classes,
)
from trainer.estimator.heads.metrics import (
    AccuracyBaseline,
    LogitsAccuracy,
    LogitsAUC,
    LogitsPrecision,
    LogitsRecall,
    MeanOf,
    at_thresholds,
)
from trainer.metrics import Metric


class BinaryClassHead(Head):
    """Head for binary classification, with the sigmoid cross-entropy of a single logit as loss.

    Labels are probabilities in [0, 1], usually 0 or 1, or names in `label_vocabulary`. Metrics: "accuracy",
    "accuracy_baseline", "auc", "auc_precision_recall", "average_loss", "label/mean", "precision", "prediction/mean",
    "recall". Predictions: "logits", "logistic", "probabilities", "class_ids", "classes", "all_class_ids",
    "all_classes".

    Args:
      weight_column, loss_reduction, loss_fn, name: as in `Head`.
      thresholds: additional thresholds between 0 and 1, each with accuracy, precision and recall.
      label_vocabulary: class names, for text labels.

    Example:
      >>> BinaryClassHead().logits_dimension
      1

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/BinaryClassHead
    """

    def __init__(self, weight_column: WeightColumn = None, thresholds: Sequence[float] | None = None,
                 label_vocabulary: Sequence[str] | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", loss_fn: LossFn | None = None,
                 name: str | None = None):
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        self._thresholds = checked_thresholds(thresholds)
        self._vocabulary = checked_vocabulary(label_vocabulary, 2)

    @property
    def logits_dimension(self) -> int:
        return 1

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logits, labels)[:, 0]

    def metrics(self) -> list[Metric]:
        key = self.key
        return [
            MeanOf(self.row_losses, key("average_loss")), LogitsAccuracy(name=key("accuracy")),
            LogitsPrecision(name=key("precision")), LogitsRecall(name=key("recall")),
            MeanOf(lambda labels, logits: jax.nn.sigmoid(logits), key("prediction/mean")),
            MeanOf(lambda labels, logits: labels, key("label/mean")), AccuracyBaseline(key("accuracy_baseline")),
            LogitsAUC(name=key("auc")), LogitsAUC(curve="PR", name=key("auc_precision_recall")),
            *at_thresholds(self._thresholds, key)]

    def predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        logistic = jax.nn.sigmoid(logits)
        both = jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)
        return {"logits": logits, "logistic": logistic, "probabilities": jax.nn.softmax(both),
                "class_ids": jnp.argmax(both, axis=-1)[:, None].astype(jnp.int32)}

    def encoded_labels(self, labels: PyTree) -> np.ndarray:
        if self._vocabulary is not None:
            return class_ids(labels, 2, self._vocabulary).astype(np.float32)
        column = as_column(labels, np.float32, 1, "Labels")
        wrong = column[~((column >= 0) & (column <= 1))]
        if wrong.size:
            raise ValueError(f"Labels must be in range [0, 1]. Received: {wrong.ravel()[0]:g}.{_more_classes(column)}")
        return column

    def decoded(self, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {**predictions, **names_of_classes(predictions["class_ids"], 2, self._vocabulary)}


def _more_classes(labels: np.ndarray) -> str:
    """Returns the fix for labels that number more than two classes from 0; an empty string for other labels."""
    if not (np.isfinite(labels) & (labels >= 0) & (labels == np.floor(labels))).all():
        return ""
    classes = int(labels.max()) + 1
    return f" For {classes} classes, give `n_classes={classes}`, or the head `MultiClassHead({classes})`."
