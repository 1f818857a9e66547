"""Area under a curve of predictions at all thresholds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.errors import describe
from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_array, check_same_shape, match_ranks, matched_shapes
from trainer.metrics.arrays import divide_no_nan, full_weights
from trainer.metrics.base import Metric
from trainer.metrics.confusion import COUNTS, as_thresholds, count_at_thresholds, evenly_spaced_thresholds

# Distance of the outermost thresholds from [0, 1], so that all predictions are above the first threshold and none is
# above the last.
MARGIN = 1e-7


class AUCCurve(enum.Enum):
    """The curve: receiver operating characteristic, precision over recall, or precision gain over recall gain."""

    ROC = "ROC"
    PR = "PR"
    PRGAIN = "PRGAIN"

    @classmethod
    def from_str(cls, key: str | Self) -> Self:
        """Returns the member with the given name, in upper or lower case.

        Raises:
          ValueError: if the name is unknown.
        """
        for curve in cls:
            if key in (curve, curve.value, curve.value.lower()):
                return curve
        raise ValueError(f'Invalid AUC curve value: "{key}". Expected values are ["PR", "ROC", "PRGAIN"]')


class AUCSummationMethod(enum.Enum):
    """The height of the area between two thresholds: the mean, the larger or the smaller of both heights."""

    INTERPOLATION = "interpolation"
    MAJORING = "majoring"
    MINORING = "minoring"

    @classmethod
    def from_str(cls, key: str | Self) -> Self:
        """Returns the member with the given name, in lower case or capitalized.

        Raises:
          ValueError: if the name is unknown.
        """
        for method in cls:
            if key in (method, method.value, method.value.capitalize()):
                return method
        raise ValueError(f'Invalid AUC summation method value: "{key}". '
                         'Expected values are ["interpolation", "majoring", "minoring"]')


class AUC(Metric):
    """The area under the ROC or precision-recall curve, approximated by a Riemann sum over thresholds.

    Args:
      num_thresholds: number of evenly spaced thresholds in [0, 1]; more thresholds approximate the area better.
      curve: "ROC", "PR" or "PRGAIN", or an `AUCCurve`.
      summation_method: "interpolation", "majoring" or "minoring", or an `AUCSummationMethod`.
      name: see `Metric`.
      dtype: see `Metric`.
      thresholds: thresholds in [0, 1] to use instead; 0 and 1 are added.
      multi_label: whether to compute the area for each label and average the areas. If False, all labels are flattened
        into a single label.
      num_labels: number of labels, for `multi_label`; inferred from the data if None.
      label_weights: weight of each label: for its area if `multi_label`, and for its counts otherwise.
      from_logits: whether predictions are logits, rather than probabilities.

    Raises:
      TypeError: if a threshold is not a number.
      ValueError: if another argument is invalid. In updates, if the shapes do not match each other or the number of
        labels.

    Source: for "interpolation" of the PR curve, Davis and Goadrich, "The Relationship Between Precision-Recall and
    ROC Curves", 2006; for PRGAIN, Flach and Kull, "Precision-Recall-Gain Curves", 2015.

    >>> float(AUC(num_thresholds=3)([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]))
    0.75
    """

    direction = "max"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str | AUCCurve = "ROC",
        summation_method: str | AUCSummationMethod = "interpolation",
        name: str | None = None,
        dtype: DTypeLike | None = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ):
        if thresholds is not None:
            inner = sorted(as_thresholds(thresholds))
        elif num_thresholds > 1:
            inner = evenly_spaced_thresholds(num_thresholds)[1:-1]
        else:
            raise ValueError(f"Argument `num_thresholds` must be an integer > 1. "
                             f"Received: num_thresholds={num_thresholds}")
        if num_labels and not multi_label:
            raise ValueError("`num_labels` is needed only when `multi_label` is True.")
        if label_weights is not None:
            weights = arguments.as_numbers("label_weights", label_weights)
            if weights.ndim != 1 or not np.isfinite(weights).all():
                raise ValueError("`label_weights` must be a list of finite numbers. Received: "
                                 f"{describe(label_weights)}.")
        super().__init__(dtype, name)
        self.thresholds = [-MARGIN, *inner, 1.0 + MARGIN]
        self.num_thresholds = len(self.thresholds)
        self.curve = AUCCurve.from_str(curve)
        self.summation_method = AUCSummationMethod.from_str(summation_method)
        self.multi_label = multi_label
        self.num_labels = num_labels
        self.label_weights = label_weights
        self._init_thresholds = thresholds
        self._from_logits = from_logits
        if not multi_label:
            self._add_counts(())
        elif num_labels:
            self._add_counts((num_labels,))

    def _add_counts(self, labels: tuple[int, ...]) -> None:
        for count in COUNTS:
            setattr(self, count, self.add_variable((self.num_thresholds, *labels), name=count))

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        check_same_shape(y_true, y_pred)
        if self.multi_label and len(y_pred.shape) != 2:
            raise ValueError(f"`y_pred` must have rank 2 when `multi_label=True`. Found rank {len(y_pred.shape)}. "
                             f"Full shape received for `y_pred`: {tuple(y_pred.shape)}")
        shape = matched_shapes(tuple(y_true.shape), tuple(y_pred.shape))[1]
        labels = shape[-1] if len(shape) > 1 else 1
        if self.num_labels and self.num_labels != labels:
            raise ValueError(f"`num_labels` must be the number of labels, {labels}. Received: "
                             f"num_labels={self.num_labels}, y_pred.shape={tuple(y_pred.shape)}. Leave it out to take "
                             "it from the data.")
        if self.label_weights is not None and np.shape(self.label_weights) != (labels,):
            raise ValueError(f"`label_weights` must hold one weight for each of {labels} labels. Received: weights of "
                             f"shape {np.shape(self.label_weights)}, y_pred.shape={tuple(y_pred.shape)}.")

    def build(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if not self._variables:
            self.validate(y_true, y_pred)
            self._add_counts((y_pred.shape[1],))

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Accumulates the counts of a batch.

        Args:
          y_true: labels, 0 for false and nonzero for true, `(n, ...)`; `(n, labels)` if `multi_label`.
          y_pred: probabilities or logits of the same shape. Probabilities are clipped to [0, 1].
          sample_weight: a scalar, or one weight per row or per label.

        Raises:
          ValueError: if the shapes do not match.
        """
        y_true, y_pred = as_array(y_true), as_array(y_pred)
        self.validate(y_true, y_pred)
        y_true, y_pred = match_ranks(y_true, y_pred)
        self.build(y_true, y_pred)
        weights = full_weights(y_pred, sample_weight)
        if self.label_weights is not None and not self.multi_label:
            weights = weights * jnp.asarray(self.label_weights)
        y_pred = jnp.clip(jax.nn.sigmoid(y_pred) if self._from_logits else y_pred, 0.0, 1.0)
        columns = y_pred.shape[1] if self.multi_label else 1
        y_true, y_pred, weights = (array.reshape(-1, columns) for array in (y_true, y_pred, weights))
        for count, counted in count_at_thresholds(y_true, y_pred, weights, self.thresholds).items():
            variable = getattr(self, count)
            variable.assign_add(counted.reshape(variable.shape))

    def result(self) -> jax.Array:
        """Returns the area, a scalar."""
        counts = [getattr(self, count).value for count in COUNTS]
        if self.curve is AUCCurve.PR and self.summation_method is AUCSummationMethod.INTERPOLATION:
            segments = _interpolated_precision(*counts)
        else:
            x, y = {AUCCurve.ROC: _roc, AUCCurve.PR: _precision_recall, AUCCurve.PRGAIN: _gains}[self.curve](*counts)
            heights = {
                AUCSummationMethod.INTERPOLATION: (y[:-1] + y[1:]) / 2.0,
                AUCSummationMethod.MAJORING: jnp.maximum(y[:-1], y[1:]),
                AUCSummationMethod.MINORING: jnp.minimum(y[:-1], y[1:]),
            }[self.summation_method]
            segments = (x[:-1] - x[1:]) * heights
        areas = jnp.sum(segments, axis=0)
        if self.label_weights is None or not self.multi_label:
            return jnp.mean(areas)
        label_weights = jnp.asarray(self.label_weights)
        return divide_no_nan(jnp.sum(areas * label_weights), jnp.sum(label_weights))

    def get_config(self) -> dict[str, Any]:
        config = {
            **super().get_config(),
            "curve": self.curve.value,
            "summation_method": self.summation_method.value,
            "from_logits": self._from_logits,
        }
        config.pop("thresholds", None)  # subclasses may not take it
        return config if self._init_thresholds is None else {**config, "thresholds": sorted(self._init_thresholds)}


# The functions below take the counts at ascending thresholds (descending rates) along axis 0, in the order of `COUNTS`.


def _roc(tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array) -> tuple[jax.Array, jax.Array]:
    return divide_no_nan(fp, fp + tn), divide_no_nan(tp, tp + fn)


def _precision_recall(tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array) -> tuple[jax.Array, jax.Array]:
    return divide_no_nan(tp, tp + fn), divide_no_nan(tp, tp + fp)


def _gains(tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array) -> tuple[jax.Array, jax.Array]:
    odds = divide_no_nan(tp + fn, tn + fp)
    recall_gain = jnp.where(tp == 0, 0.0, jnp.maximum(1.0 - odds * divide_no_nan(fn, tp), 0.0))
    precision_gain = jnp.where(tp == 0, 1.0, 1.0 - odds * divide_no_nan(fp, tp))
    return recall_gain, precision_gain


def _interpolated_precision(tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array) -> jax.Array:
    # Between two thresholds true positives grow linearly with all positives p: tp = intercept + slope * p. The area
    # is the integral of tp / p over recall: slope * (rise of tp + intercept * log(ratio of p)) / all true labels.
    p = tp + fp
    rise = tp[:-1] - tp[1:]
    # Negative differences and sums, from negative weights, are clipped to 0, as in Keras.
    slope = divide_no_nan(rise, jnp.maximum(p[:-1] - p[1:], 0.0))
    intercept = tp[1:] - slope * p[1:]
    ratio = jnp.where((p[:-1] > 0) & (p[1:] > 0), divide_no_nan(p[:-1], p[1:]), 1.0)
    return divide_no_nan(slope * (rise + intercept * jnp.log(ratio)), jnp.maximum(tp[1:] + fn[1:], 0.0))
