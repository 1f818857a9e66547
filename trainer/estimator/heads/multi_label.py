"""The head for classification with any number of classes per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.core import arguments, errors
from trainer.core.types import PyTree
from trainer.estimator.heads.base import (
    Head,
    LossFn,
    LossReduction,
    WeightColumn,
    as_column,
    checked_thresholds,
    checked_vocabulary,
)
from trainer.estimator.heads.metrics import LogitsAUC, MeanOf, at_thresholds
from trainer.metrics import Metric


class MultiLabelHead(Head):
    """Head for multi-label classification, with the mean of the classes' sigmoid cross-entropies as loss.

    Labels are 0 or 1 per class, of shape (rows, n_classes), or, with `label_vocabulary`, a list of names per row.
    Metrics: "average_loss", "auc", "auc_precision_recall". Predictions: "logits", "probabilities".

    Args:
      n_classes: number of classes, at least 2.
      weight_column, loss_reduction, loss_fn, name: as in `Head`.
      thresholds: additional thresholds between 0 and 1, each with accuracy, precision and recall.
      label_vocabulary: class names, for text labels.

    Example:
      >>> MultiLabelHead(3, label_vocabulary=["a", "b", "c"]).encoded_labels([["a", "c"], []]).tolist()
      [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/MultiLabelHead
    """

    def __init__(self, n_classes: int, weight_column: WeightColumn = None, thresholds: Sequence[float] | None = None,
                 label_vocabulary: Sequence[str] | None = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", loss_fn: LossFn | None = None,
                 name: str | None = None):
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        self._n_classes = arguments.as_count("n_classes", n_classes, 2)
        self._thresholds = checked_thresholds(thresholds)
        self._vocabulary = checked_vocabulary(label_vocabulary, n_classes)

    @property
    def logits_dimension(self) -> int:
        return self._n_classes

    @property
    def label_width(self) -> int:
        return self._n_classes

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels), axis=-1)

    def metrics(self) -> list[Metric]:
        key = self.key
        return [MeanOf(self.row_losses, key("average_loss")), LogitsAUC(name=key("auc")),
                LogitsAUC(curve="PR", name=key("auc_precision_recall")), *at_thresholds(self._thresholds, key)]

    def predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        return {"logits": logits, "probabilities": jax.nn.sigmoid(logits)}

    def encoded_labels(self, labels: PyTree) -> np.ndarray:
        if self._vocabulary is not None:
            return self._hot(labels)
        column = as_column(labels, np.float32, self._n_classes, "Labels")
        wrong = column[(column != 0) & (column != 1)]
        if wrong.size:
            raise ValueError(f"Labels must be 0 or 1 for each class. Received: {wrong.ravel()[0]:g}.")
        return column

    def _hot(self, labels: Any) -> np.ndarray:
        assert self._vocabulary is not None, "asked before"
        numbers = {name: number for number, name in enumerate(self._vocabulary)}
        hot = np.zeros((len(labels), self._n_classes), np.float32)
        for row, names in enumerate(labels):
            for name in np.asarray(names, object).ravel().tolist():
                name = name.decode() if isinstance(name, bytes) else name
                if name == "":
                    continue  # padding of rows with fewer labels
                if name not in numbers:
                    raise ValueError(f"The label {name!r} is not in `label_vocabulary`. "
                                     f"{errors.near_hint(str(name), numbers)}")
                hot[row, numbers[name]] = 1
        return hot
