"""The head for regression."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import arguments
from trainer.core.types import PyTree
from trainer.estimator.heads.base import Head, LossFn, LossReduction, WeightColumn, as_column
from trainer.estimator.heads.metrics import MeanOf
from trainer.metrics import Metric


class RegressionHead(Head):
    """Head for regression, with the squared error as loss.

    Metrics: "average_loss", "prediction/mean", "label/mean". Predictions: "predictions", of shape (rows,
    label_dimension).

    Args:
      label_dimension: number of values per label.
      weight_column, loss_reduction, loss_fn, name: as in `Head`.
      inverse_link_fn: function from logits to predictions, such as `jnp.exp`; None for the identity.

    Example:
      >>> RegressionHead(2).logits_dimension
      2

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/RegressionHead
    """

    def __init__(self, label_dimension: int = 1, weight_column: WeightColumn = None,
                 loss_reduction: LossReduction = "sum_over_batch_size", loss_fn: LossFn | None = None,
                 inverse_link_fn: Callable[[jax.Array], jax.Array] | None = None, name: str | None = None):
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        arguments.require_functions(inverse_link_fn=inverse_link_fn)
        self._dimension = arguments.as_count("label_dimension", label_dimension)
        self._inverse_link = inverse_link_fn

    @property
    def logits_dimension(self) -> int:
        return self._dimension

    @property
    def label_width(self) -> int:
        return self._dimension

    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(labels - logits), axis=-1)

    def metrics(self) -> list[Metric]:
        return [MeanOf(self.row_losses, self.key("average_loss")),
                MeanOf(lambda labels, logits: self._linked(logits), self.key("prediction/mean")),
                MeanOf(lambda labels, logits: labels, self.key("label/mean"))]

    def predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        linked = {} if self._inverse_link is None else {"logits": logits}
        return {"predictions": self._linked(logits), **linked}

    def encoded_labels(self, labels: PyTree) -> np.ndarray:
        return as_column(labels, np.float32, self._dimension, "Labels")

    def _linked(self, logits: jax.Array) -> jax.Array:
        return logits if self._inverse_link is None else self._inverse_link(logits)
