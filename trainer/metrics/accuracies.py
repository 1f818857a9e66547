"""How often predictions match labels: equal numbers, yes or no, the likeliest class, the k likeliest classes.

Functions take arrays, labels first, and return float32 ones and zeros: one for each prediction, or one for each
vector of class scores. Classes are their means.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.shapes import check_class_indices, check_same_shape, class_indices, match_ranks
from trainer.metrics.reduction import MeanMetricWrapper


def accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns whether predictions equal labels, one by one.

    >>> accuracy([[1], [2]], [[1], [3]]).tolist()
    [[1.0], [0.0]]
    """
    y_true, y_pred = match_ranks(jnp.asarray(y_true), jnp.asarray(y_pred))
    return jnp.equal(y_true, y_pred).astype(jnp.float32)


def binary_accuracy(y_true: ArrayLike, y_pred: ArrayLike, threshold: float = 0.5) -> jax.Array:
    """Returns whether `y_pred > threshold` is what the label says, one by one.

    >>> binary_accuracy([[1], [1]], [[0.9], [0.5]]).tolist()
    [[1.0], [0.0]]
    """
    return accuracy(y_true, jnp.asarray(y_pred) > threshold)


def categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns whether the largest prediction is at the largest label; both `(n, ..., classes)`.

    >>> categorical_accuracy([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]).tolist()
    [1.0, 0.0]
    """
    return sparse_categorical_accuracy(jnp.argmax(jnp.asarray(y_true), axis=-1), y_pred)


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns whether the largest prediction is at the labelled class.

    Args:
      y_true: class indices, `(n, ...)` or `(n, ..., 1)`.
      y_pred: scores, `(n, ..., classes)`: probabilities or logits.

    Raises:
      ValueError: where the shapes cannot match.

    >>> sparse_categorical_accuracy([1, 0], [[0.1, 0.9], [0.2, 0.8]]).tolist()
    [1.0, 0.0]
    """
    y_pred = jnp.asarray(y_pred)
    matches = jnp.equal(class_indices(y_true, y_pred, axis=-1), jnp.argmax(y_pred, axis=-1)).astype(jnp.float32)
    # As in Keras, a single step per row is no axis of its own.
    return matches.squeeze(-1) if matches.ndim > 1 and matches.shape[-1] == 1 else matches


def top_k_categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike, k: int = 5) -> jax.Array:
    """Returns whether the class of the largest label is among the `k` best; both `(n, ..., classes)`.

    >>> top_k_categorical_accuracy([[0, 0, 1]], [[0.1, 0.6, 0.3]], k=2).tolist()
    [1.0]
    """
    return sparse_top_k_categorical_accuracy(jnp.argmax(jnp.asarray(y_true), axis=-1), y_pred, k)


def sparse_top_k_categorical_accuracy(
    y_true: Any, y_pred: Any, k: int = 5, from_sorted_ids: bool = False
) -> jax.Array:
    """Returns whether the labelled class is among the `k` best; classes of equal score share the best rank.

    Args:
      y_true: class indices, `(n, ...)` or `(n, ..., 1)`.
      y_pred: scores, `(n, ..., classes)`, or the best classes, best first, where `from_sorted_ids`.
      k: how many classes to look at.
      from_sorted_ids: whether `y_pred` holds class indices.

    Raises:
      ValueError: where the shapes cannot match.

    >>> sparse_top_k_categorical_accuracy([2, 0], [[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]], k=2).tolist()
    [1.0, 0.0]
    """
    y_pred = jnp.asarray(y_pred)
    labels = class_indices(y_true, y_pred, axis=-1)[..., None]
    if from_sorted_ids:
        matches = jnp.any(y_pred[..., :k] == labels, axis=-1)
    else:
        score = jnp.take_along_axis(y_pred, labels, axis=-1)
        # A score of NaN ranks last, and not, as comparisons would have it, first.
        score = jnp.where(jnp.isnan(score), -jnp.inf, score)
        matches = jnp.sum(y_pred > score, axis=-1) < k
    return matches.astype(jnp.float32).reshape(jnp.asarray(y_true).shape)


class Accuracy(MeanMetricWrapper):
    """How often predictions equal labels.

    >>> float(Accuracy()([[1], [2]], [[1], [3]]))
    0.5
    """

    direction = "max"

    def __init__(self, name: str | None = "accuracy", dtype: DTypeLike | None = None):
        super().__init__(accuracy, name, dtype)

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred)


class BinaryAccuracy(MeanMetricWrapper):
    """How often predictions, above `threshold` or not, match yes-or-no labels.

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
    """What the accuracies of one-hot labels share: their check of shapes."""

    direction = "max"

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred, "For labels that are class indices use the metric's sparse form; otherwise "
                                         "give one label for each class.")
        if len(y_pred.shape) < 2:
            raise ValueError(f"`y_pred` must have shape (batch, ..., classes) for the metric {self.name!r}. Received: "
                             f"y_pred.shape={tuple(y_pred.shape)}. Add the missing axis.")


class CategoricalAccuracy(OneHotAccuracy):
    """How often the likeliest class is that of a one-hot label; scores may be probabilities or logits.

    >>> float(CategoricalAccuracy()([[0, 1], [1, 0]], [[0.1, 0.9], [0.2, 0.8]]))
    0.5
    """

    def __init__(self, name: str | None = "categorical_accuracy", dtype: DTypeLike | None = None):
        super().__init__(categorical_accuracy, name, dtype)


class TopKCategoricalAccuracy(OneHotAccuracy):
    """How often the class of a one-hot label is among the `k` likeliest.

    Raises:
      TypeError: if `k` is not a whole number.
      ValueError: if it is below 1.

    >>> float(TopKCategoricalAccuracy(k=2)([[0, 0, 1]], [[0.1, 0.6, 0.3]]))
    1.0
    """

    def __init__(self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: DTypeLike | None = None):
        arguments.check_count("k", k)
        super().__init__(top_k_categorical_accuracy, name, dtype, k=k)
        self.k = k


class IndexAccuracy(MeanMetricWrapper):
    """What the accuracies of class indices share: their check of shapes."""

    direction = "max"
    matches_arguments = False  # a last axis of size 1 is that of classes

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if not y_pred.shape:
            raise ValueError(f"`y_pred` must have shape (batch, ..., classes) for the metric {self.name!r}. "
                             f"Received: y_pred.shape=(). Add the missing axes.")
        check_class_indices(y_true, y_pred, axis=-1)


class SparseCategoricalAccuracy(IndexAccuracy):
    """How often the likeliest class is the labelled one; scores may be probabilities or logits.

    >>> float(SparseCategoricalAccuracy()([1, 0], [[0.1, 0.9], [0.2, 0.8]]))
    0.5
    """

    def __init__(self, name: str | None = "sparse_categorical_accuracy", dtype: DTypeLike | None = None):
        super().__init__(sparse_categorical_accuracy, name, dtype)


class SparseTopKCategoricalAccuracy(IndexAccuracy):
    """How often the labelled class is among the `k` likeliest.

    Args:
      k: how many classes to look at.
      name: see `Metric`.
      dtype: see `Metric`.
      from_sorted_ids: whether predictions are class indices, best first, and not scores.

    Raises:
      TypeError: if `k` is not a whole number.
      ValueError: if it is below 1.

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
