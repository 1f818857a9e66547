"""The head for classification with one of several classes per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.core import arguments
from trainer.core.types import PyTree
from trainer.estimator.heads.base import (
    Head,
    LossFn,
    LossReduction,
    WeightColumn,
    checked_vocabulary,
    class_ids,
    names_of_classes,
)
from trainer.estimator.heads.metrics import MeanOf
from trainer.metrics import Metric


class MultiClassHead(Head):
    """Head for multi-class classification, with the softmax cross-entropy as loss.

    Labels are class ids from 0, or names in `label_vocabulary`. Metrics: "accuracy", "average_loss". Predictions:
    "logits", "probabilities", "class_ids", "classes", "all_class_ids", "all_classes".

    Args:
      n_classes: number of classes, at least 3; use `BinaryClassHead` for 2.
      weight_column, loss_reduction, loss_fn, name: as in `Head`.
      label_vocabulary: class names, for text labels.

    Example:
      >>> MultiClassHead(3).logits_dimension
      3

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/MultiClassHead
    """

    def __init__(self, n_classes: int, weight_column: WeightColumn = None,
                 label_vocabulary: Sequence[str] | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", loss_fn: LossFn | None = None,
                 name: str | None = None):
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        self._n_classes = arguments.as_count("n_classes", n_classes, 3, "a whole number of at least 3; "
                                             "`BinaryClassHead` is for 2")
        self._vocabulary = checked_vocabulary(label_vocabulary, n_classes)

    @property
    def logits_dimension(self) -> int:
        return self._n_classes

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 0].astype(jnp.int32))

    def metrics(self) -> list[Metric]:
        def is_right(labels: jax.Array, logits: jax.Array) -> jax.Array:
            return (jnp.argmax(logits, axis=-1) == labels[:, 0]).astype(jnp.float32)

        return [MeanOf(self.row_losses, self.key("average_loss")), MeanOf(is_right, self.key("accuracy"))]

    def predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        return {"logits": logits, "probabilities": jax.nn.softmax(logits),
                "class_ids": jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)}

    def encoded_labels(self, labels: PyTree) -> np.ndarray:
        return class_ids(labels, self._n_classes, self._vocabulary)

    def decoded(self, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {**predictions, **names_of_classes(predictions["class_ids"], self._n_classes, self._vocabulary)}
