"""Counts of true and false, positive and negative predictions at thresholds, and their ratios.

Owns the counting of predictions at many thresholds at once, and the metrics that keep such counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_array, check_same_shape, in_dtype, match_ranks, matched_shapes
from trainer.metrics.arrays import divide_no_nan, full_weights, sums_by_bucket
from trainer.metrics.base import Metric

#: The counts at each threshold.
COUNTS = ("true_positives", "false_positives", "true_negatives", "false_negatives")

# Below every score: with `top_k`, all of the top k predictions are positive, regardless of their scores.
TOP_K_THRESHOLD = -1e10


def evenly_spaced_thresholds(number: int) -> list[float]:
    """Returns `number` evenly spaced thresholds from 0 to 1, inclusive.

    >>> evenly_spaced_thresholds(3)
    [0.0, 0.5, 1.0]
    """
    return (np.arange(number) / (number - 1)).tolist()


def as_thresholds(thresholds: float | Sequence[float]) -> list[float]:
    """Returns a threshold or a sequence of thresholds as a list.

    Raises:
      TypeError: if a threshold is not a number.
      ValueError: if a threshold is not in [0, 1].
    """
    several: list[Any] = [thresholds] if np.ndim(thresholds) == 0 else list(thresholds)  # type: ignore[arg-type]
    outside = [threshold for threshold in several if threshold is None
               or not 0 <= arguments.as_number("thresholds", threshold, "a number or several, each in [0, 1]") <= 1]
    if outside:
        raise ValueError(f"Threshold values must be in [0, 1]. Received: {outside}")
    return several


def count_at_thresholds(
    y_true: jax.Array, y_pred: jax.Array, weights: jax.Array, thresholds: Sequence[float]
) -> dict[str, jax.Array]:
    """Returns the counts at each threshold. A prediction above a threshold is positive.

    Sorts predictions into the buckets between thresholds by an unrolled binary search, and sums the buckets
    cumulatively from both ends. No intermediate array has size `n * thresholds`.

    Args:
      y_true: labels, 0 for false and nonzero for true, `(n, labels)`.
      y_pred: scores, `(n, labels)`.
      weights: `(n, labels)`.
      thresholds: numbers in any order.

    Returns:
      Sums of weights, float32, `(len(thresholds), labels)`, by the names in `COUNTS`.

    >>> ones = jnp.ones((3, 1))
    >>> counts = count_at_thresholds(jnp.array([[0], [1], [1]]), jnp.array([[0.2], [0.4], [0.8]]), ones, [0.5, 0.1])
    >>> counts["true_positives"].ravel().tolist()
    [1.0, 2.0]
    """
    order = np.argsort(thresholds, kind="stable")
    given_order = np.argsort(order, kind="stable")
    ascending = jnp.asarray(np.asarray(thresholds)[order], jnp.float32)
    # The default method is a loop: on GPUs each iteration is a kernel, and CUDA graphs cannot contain it.
    buckets = jnp.searchsorted(
        ascending, in_dtype("`y_pred`", y_pred, jnp.float32), side="left", method="scan_unrolled")
    is_true = y_true != 0
    counts = {}
    for kind, selected in (("true", is_true), ("false", ~is_true)):
        sums = sums_by_bucket(jnp.where(selected, weights, 0.0), buckets, len(thresholds) + 1)
        above = jax.lax.cumsum(sums, axis=0, reverse=True)[1:][given_order]
        not_above = jax.lax.cumsum(sums, axis=0)[:-1][given_order]
        counts[f"{kind}_positives"] = above
        # A negative prediction is the opposite of its label if false: a true label gives a false negative.
        counts["false_negatives" if kind == "true" else "true_negatives"] = not_above
    return counts


class ConfusionMetric(Metric):
    """The base class of metrics of counts at thresholds. A subclass sets `counts`, and may define `result`.

    Args:
      thresholds: a number or a sequence of numbers in [0, 1]; 0.5 if None.
      top_k: if given, only the top k predictions of a row can be positive. All of them are positive, unless
        `thresholds` is also given.
      class_id: if given, only predictions and labels of this class count.
      name: see `Metric`.
      dtype: see `Metric`.

    Raises:
      TypeError: if `thresholds` or `top_k` has another type.
      ValueError: if a threshold is outside [0, 1] or `top_k` is below 1. In updates, if `top_k` or `class_id` exceeds
        the classes.
    """

    #: The members of `COUNTS` that the metric keeps, each in a variable and attribute of the same name.
    counts: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        super().__init__(dtype, name)
        if top_k is not None:
            arguments.check_count("top_k", top_k)
        self.init_thresholds = thresholds
        self.top_k = top_k
        self.class_id = class_id
        if thresholds is None:
            self.thresholds = [0.5 if top_k is None else TOP_K_THRESHOLD]
        else:
            self.thresholds = as_thresholds(thresholds)
        for count in self.counts:
            setattr(self, count, self.add_variable((len(self.thresholds),), name=count))

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if self.class_id is not None and len(y_pred.shape) < 2:
            raise ValueError(f"When class_id is provided, y_pred must be a 2D array with shape (num_samples, "
                             f"num_classes), found shape: {tuple(y_pred.shape)}")
        check_same_shape(y_true, y_pred)
        shape = matched_shapes(tuple(y_true.shape), tuple(y_pred.shape))[1]
        classes = shape[-1] if shape else 1
        # JAX would clamp the index to the nearest class.
        if self.class_id is not None and not -classes <= self.class_id < classes:
            raise ValueError(f"`class_id` must be a class of the predictions, in [-{classes}, {classes}). Received: "
                             f"class_id={self.class_id}, y_pred.shape={tuple(y_pred.shape)}.")
        if self.top_k is not None and self.top_k > classes:
            raise ValueError(f"`top_k` must be at most the number of classes, {classes}. Received: "
                             f"top_k={self.top_k}, y_pred.shape={tuple(y_pred.shape)}.")

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Accumulates the counts of a batch.

        Args:
          y_true: labels, 0 for false and nonzero for true, `(n, ...)`.
          y_pred: scores of the same shape, mostly in [0, 1].
          sample_weight: a scalar, or one weight per row or per score.

        Raises:
          ValueError: if the shapes do not match.
        """
        y_true, y_pred = as_array(y_true), as_array(y_pred)
        self.validate(y_true, y_pred)
        y_true, y_pred = match_ranks(y_true, y_pred)
        weights = full_weights(y_pred, sample_weight)
        if self.top_k is not None:
            best = jax.nn.one_hot(jax.lax.top_k(y_pred, self.top_k)[1], y_pred.shape[-1], dtype=bool)
            y_pred = jnp.where(best.any(axis=-2), y_pred, -jnp.inf)
        if self.class_id is not None:
            y_true, y_pred, weights = (array[..., self.class_id] for array in (y_true, y_pred, weights))
        y_true, y_pred, weights = (array.reshape(-1, 1) for array in (y_true, y_pred, weights))
        counted = count_at_thresholds(y_true, y_pred, weights, self.thresholds)
        for count in self.counts:
            getattr(self, count).assign_add(counted[count][:, 0])

    def ratio(self, part: str, rest: str) -> jax.Array:
        """Returns `part / (part + rest)` of two counts at each threshold; 0 if both counts are 0."""
        numerator = getattr(self, part).value
        return divide_no_nan(numerator, numerator + getattr(self, rest).value)

    def for_each_threshold(self, values: jax.Array) -> jax.Array:
        """Returns a scalar for a single threshold, and the unchanged values otherwise."""
        return values[0] if len(self.thresholds) == 1 else values

    def result(self) -> jax.Array:
        """Returns the first count: a scalar for a single threshold, and an array otherwise."""
        return self.for_each_threshold(getattr(self, self.counts[0]).value)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        if "thresholds" in config:
            # The given thresholds, because the default depends on the other arguments.
            config["thresholds"] = self.init_thresholds
        return config


class CountMetric(ConfusionMetric):
    """The base class of plain counts, with Keras's arguments.

    Args:
      thresholds: a number or a sequence of numbers in [0, 1]; 0.5 if None.
      name: see `Metric`.
      dtype: see `Metric`.
    """

    def __init__(
        self, thresholds: float | Sequence[float] | None = None, name: str | None = None, dtype: DTypeLike | None = None
    ):
        super().__init__(thresholds, name=name, dtype=dtype)


class TruePositives(CountMetric):
    """The number of true positives.

    >>> float(TruePositives()([0, 1, 1, 1], [0.0, 1.0, 0.2, 0.9]))
    2.0
    """

    counts = ("true_positives",)
    direction = "max"


class FalsePositives(CountMetric):
    """The number of false positives.

    >>> float(FalsePositives()([0, 1, 0, 0], [0.0, 0.0, 1.0, 0.9]))
    2.0
    """

    counts = ("false_positives",)
    direction = "min"


class TrueNegatives(CountMetric):
    """The number of true negatives.

    >>> float(TrueNegatives()([0, 1, 0, 0], [0.0, 0.0, 1.0, 0.1]))
    2.0
    """

    counts = ("true_negatives",)
    direction = "max"


class FalseNegatives(CountMetric):
    """The number of false negatives.

    >>> float(FalseNegatives()([0, 1, 1, 1], [0.0, 1.0, 0.2, 0.9]))
    1.0
    """

    counts = ("false_negatives",)
    direction = "min"


class Precision(ConfusionMetric):
    """The share of positive predictions whose labels are true; see `ConfusionMetric` for the arguments.

    >>> round(float(Precision()([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])), 4)
    0.6667
    """

    counts = ("true_positives", "false_positives")
    direction = "max"

    def result(self) -> jax.Array:
        return self.for_each_threshold(self.ratio("true_positives", "false_positives"))


class Recall(ConfusionMetric):
    """The share of true labels with positive predictions; see `ConfusionMetric` for the arguments.

    >>> round(float(Recall()([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])), 4)
    0.6667
    """

    counts = ("true_positives", "false_negatives")
    direction = "max"

    def result(self) -> jax.Array:
        return self.for_each_threshold(self.ratio("true_positives", "false_negatives"))
