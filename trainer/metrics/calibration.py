"""Calibration: whether predicted probabilities are the shares of labels that hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_array, as_float, check_class_indices, check_same_shape, match_ranks
from trainer.metrics.accuracies import categorical_accuracy, sparse_categorical_accuracy
from trainer.metrics.arrays import divide_no_nan, full_weights, sums_by_bucket
from trainer.metrics.base import Metric


class ExpectedCalibrationError(Metric):
    """The mean distance between the confidence of predictions and their accuracy, over bins of confidence.

    The confidence of a prediction is its largest probability, and its accuracy is 1 if that is the labelled class. For
    binary labels with a single probability, the confidence is the probability and the accuracy is the label. Bin `i`
    holds confidences in `(i / num_bins, (i + 1) / num_bins]`. A bin counts with its share of the predictions.

    Args:
      num_bins: number of bins.
      name: see `Metric`.
      dtype: see `Metric`.
      from_logits: whether predictions are logits.

    Raises:
      TypeError: if `num_bins` is not an integer.
      ValueError: if `num_bins` is below 1. In updates, if the shapes do not match.

    Source: Guo et al., "On Calibration of Modern Neural Networks", 2017.

    >>> labels, probabilities = [1, 0, 0], [[0.25, 0.75], [0.25, 0.75], [1.0, 0.0]]
    >>> round(float(ExpectedCalibrationError()(labels, probabilities)), 4)  # half of the predictions of 0.75 are right
    0.1667
    """

    direction = "min"

    def __init__(
        self,
        num_bins: int = 15,
        name: str | None = "expected_calibration_error",
        dtype: DTypeLike | None = None,
        from_logits: bool = False,
    ):
        self.num_bins = arguments.as_count("num_bins", num_bins)
        arguments.require_bool(from_logits=from_logits)
        super().__init__(dtype, name)
        self.from_logits = from_logits
        self.gaps = self.add_variable((self.num_bins,), name="gaps")
        self.count = self.add_variable(name="count")

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if _is_binary(y_pred) or _is_one_hot(y_true, y_pred):
            check_same_shape(y_true, y_pred, "Give one label for each prediction, or for each class.")
        else:
            check_class_indices(y_true, y_pred, axis=-1)

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Accumulates the distances of a batch.

        Args:
          y_true: class indices, `(n, ...)` or `(n, ..., 1)`; or one-hot, `(n, ..., classes)`; or binary labels.
          y_pred: probabilities, or logits if `from_logits`: `(n, ..., classes)`; or `(n, ..., 1)` or `(n,)` for binary
            labels.
          sample_weight: a scalar, or one weight per row or per label.

        Raises:
          ValueError: if the shapes do not match.
        """
        labels, predictions = as_array(y_true), as_float(y_pred)
        self.validate(labels, predictions)
        if _is_binary(predictions):
            labels, predictions = match_ranks(labels, predictions)
            confidences, hits = jax.nn.sigmoid(predictions) if self.from_logits else predictions, as_float(labels)
        else:
            probabilities = jax.nn.softmax(predictions) if self.from_logits else predictions
            accuracy = categorical_accuracy if _is_one_hot(labels, predictions) else sparse_categorical_accuracy
            confidences, hits = probabilities.max(axis=-1), accuracy(labels, predictions)
        weights = full_weights(confidences, sample_weight)
        bins = jnp.ceil(confidences * self.num_bins).astype(jnp.int32) - 1
        column = (weights * (confidences - hits)).reshape(-1, 1)
        bins = jnp.clip(bins, 0, self.num_bins - 1).reshape(-1, 1)
        self.gaps.assign_add(sums_by_bucket(column, bins, self.num_bins)[:, 0])
        self.count.assign_add(jnp.sum(weights))

    def result(self) -> jax.Array:
        """Returns the error, a scalar in [0, 1]; 0 if nothing was counted."""
        return divide_no_nan(jnp.sum(jnp.abs(self.gaps.value)), self.count.value).astype(self.dtype)


def _is_binary(y_pred: jax.Array) -> bool:
    return len(y_pred.shape) < 2 or y_pred.shape[-1] == 1


def _is_one_hot(y_true: jax.Array, y_pred: jax.Array) -> bool:
    return tuple(y_true.shape) == tuple(y_pred.shape)
