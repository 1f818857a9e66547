"""Accuracies: equality, binary accuracy, and top-1 and top-k accuracy over classes.

Functions take labels and predictions, and return float32 arrays of 0 and 1, with a value for each prediction or for
each vector of class scores. Classes compute the means.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_array, check_class_indices, check_same_shape, class_indices, match_ranks
from trainer.metrics.reduction import MeanMetricWrapper


def accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns whether each prediction equals its label.

    >>> accuracy([[1], [2]], [[1], [3]]).tolist()
    [[1.0], [0.0]]
    """
    y_true, y_pred = match_ranks(as_array(y_true), as_array(y_pred))
    return jnp.equal(y_true, y_pred).astype(jnp.float32)


def binary_accuracy(y_true: ArrayLike, y_pred: ArrayLike, threshold: float = 0.5) -> jax.Array:
    """Returns whether `y_pred > threshold` agrees with the label, elementwise.

    >>> binary_accuracy([[1], [1]], [[0.9], [0.5]]).tolist()
    [[1.0], [0.0]]
    """
    return accuracy(y_true, as_array(y_pred) > threshold)


def categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns whether the largest prediction is at the index of the largest label; both `(n, ..., classes)`.

    >>> categorical_accuracy([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]).tolist()
    [1.0, 0.0]
    """
    return sparse_categorical_accuracy(jnp.argmax(as_array(y_true), axis=-1), y_pred)


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns whether the largest prediction is at the labelled class.

    Args:
      y_true: class indices, `(n, ...)` or `(n, ..., 1)`.
      y_pred: scores, `(n, ..., classes)`: probabilities or logits.

    Raises:
      ValueError: if the shapes do not match.

    >>> sparse_categorical_accuracy([1, 0], [[0.1, 0.9], [0.2, 0.8]]).tolist()
    [1.0, 0.0]
    """
    y_pred = as_array(y_pred)
    matches = jnp.equal(class_indices(y_true, y_pred, axis=-1), jnp.argmax(y_pred, axis=-1)).astype(jnp.float32)
    # As in Keras, a last axis of size 1 is removed.
    return matches.squeeze(-1) if matches.ndim > 1 and matches.shape[-1] == 1 else matches


def top_k_categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike, k: int = 5) -> jax.Array:
    """Returns whether the class of the largest label is among the top `k` predictions; both `(n, ..., classes)`.

    >>> top_k_categorical_accuracy([[0, 0, 1]], [[0.1, 0.6, 0.3]], k=2).tolist()
    [1.0]
    """
    return sparse_top_k_categorical_accuracy(jnp.argmax(as_array(y_true), axis=-1), y_pred, k)


def sparse_top_k_categorical_accuracy(
    y_true: Any, y_pred: Any, k: int = 5, from_sorted_ids: bool = False
) -> jax.Array:
    """Returns whether the labelled class is among the top `k` predictions. Classes with equal scores share a rank.

    Args:
      y_true: class indices, `(n, ...)` or `(n, ..., 1)`. An index outside of the classes is never among them.
      y_pred: scores, `(n, ..., classes)`, or class indices in descending order of score if `from_sorted_ids`.
      k: number of top predictions to consider.
      from_sorted_ids: whether `y_pred` holds class indices.

    Raises:
      ValueError: if the shapes do not match.

    >>> sparse_top_k_categorical_accuracy([2, 0], [[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]], k=2).tolist()
    [1.0, 0.0]
    """
    y_pred = as_array(y_pred)
    labels = class_indices(y_true, y_pred, axis=-1)[..., None]
    if from_sorted_ids:
        matches = jnp.any(y_pred[..., :k] == labels, axis=-1)
    else:
        score = jnp.take_along_axis(y_pred, labels, axis=-1)
        # A score of NaN ranks last; with plain comparisons it would rank first.
        score = jnp.where(jnp.isnan(score), -jnp.inf, score)
        is_class = (labels[..., 0] >= 0) & (labels[..., 0] < y_pred.shape[-1])  # -1 would be the last class
        matches = is_class & (jnp.sum(y_pred > score, axis=-1) < k)
    return matches.astype(jnp.float32).reshape(as_array(y_true).shape)


class Accuracy(MeanMetricWrapper):
    """The share of predictions that equal their labels.

    Probabilities and logits equal no labels: `metrics=["accuracy"]` compares the classes that they stand for.

    >>> float(Accuracy()([[1], [2]], [[1], [3]]))
    0.5
    """

    direction = "max"

    def __init__(self, name: str | None = "accuracy", dtype: DTypeLike | None = None):
        super().__init__(accuracy, name, dtype)

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred, "It counts predictions that equal their labels. For probabilities or logits "
                                         "of classes use `metrics=[\"accuracy\"]`.")


class BinaryAccuracy(MeanMetricWrapper):
    """The share of predictions that agree with binary labels, after thresholding.

    >>> float(BinaryAccuracy()([[1], [0]], [[0.9], [0.6]]))
    0.5
    """

    direction = "max"

    def __init__(self, name: str | None = "binary_accuracy", dtype: DTypeLike | None = None, threshold: float = 0.5):
        super().__init__(binary_accuracy, name, dtype, threshold=threshold)
        self.threshold = threshold

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred)


class OneHotAccuracy(MeanMetricWrapper):
    """The base class of accuracies of one-hot labels: checks shapes."""

    direction = "max"

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred, "For labels that are class indices use the metric's sparse form; otherwise "
                                         "give one label for each class.")
        if len(y_pred.shape) < 2:
            raise ValueError(f"`y_pred` must have shape (batch, ..., classes) for the metric {self.name!r}. Received: "
                             f"y_pred.shape={tuple(y_pred.shape)}. Add the missing axis.")


class CategoricalAccuracy(OneHotAccuracy):
    """The share of samples whose top prediction is the class of the one-hot label, for probabilities or logits.

    >>> float(CategoricalAccuracy()([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]))
    0.5
    """

    def __init__(self, name: str | None = "categorical_accuracy", dtype: DTypeLike | None = None):
        super().__init__(categorical_accuracy, name, dtype)


class TopKCategoricalAccuracy(OneHotAccuracy):
    """The share of samples for which the class of the one-hot label is among the top `k` predictions.

    Raises:
      TypeError: if `k` is not an integer.
      ValueError: if `k` is below 1.

    >>> float(TopKCategoricalAccuracy(k=2)([[0, 0, 1]], [[0.1, 0.6, 0.3]]))
    1.0
    """

    def __init__(self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: DTypeLike | None = None):
        arguments.check_count("k", k)
        super().__init__(top_k_categorical_accuracy, name, dtype, k=k)
        self.k = k


class IndexAccuracy(MeanMetricWrapper):
    """The base class of accuracies of class indices: checks shapes."""

    direction = "max"
    matches_arguments = False  # a last axis of size 1 is the axis of classes

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if not y_pred.shape:
            raise ValueError(f"`y_pred` must have shape (batch, ..., classes) for the metric {self.name!r}. "
                             f"Received: y_pred.shape=(). Add the missing axes.")
        check_class_indices(y_true, y_pred, axis=-1)


class SparseCategoricalAccuracy(IndexAccuracy):
    """The share of samples whose top prediction is the labelled class, for probabilities or logits.

    >>> float(SparseCategoricalAccuracy()([1, 0], [[0.1, 0.9], [0.2, 0.8]]))
    0.5
    """

    def __init__(self, name: str | None = "sparse_categorical_accuracy", dtype: DTypeLike | None = None):
        super().__init__(sparse_categorical_accuracy, name, dtype)


class SparseTopKCategoricalAccuracy(IndexAccuracy):
    """The share of samples for which the labelled class is among the top `k` predictions.

    Args:
      k: number of top predictions to consider.
      name: see `Metric`.
      dtype: see `Metric`.
      from_sorted_ids: whether predictions are class indices in descending order of score, rather than scores.

    Raises:
      TypeError: if `k` is not an integer.
      ValueError: if `k` is below 1.

    >>> float(SparseTopKCategoricalAccuracy(k=2)([2, 0], [[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]))
    0.5
    """

    def __init__(
        self,
        k: int = 5,
        name: str | None = "sparse_top_k_categorical_accuracy",
        dtype: DTypeLike | None = None,
        from_sorted_ids: bool = False,
    ):
        arguments.check_count("k", k)
        super().__init__(sparse_top_k_categorical_accuracy, name, dtype, k=k, from_sorted_ids=from_sorted_ids)
        self.k = k
        self.from_sorted_ids = from_sorted_ids
