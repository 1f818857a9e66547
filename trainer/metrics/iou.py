"""Intersection over union of segmentations, computed from a confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_index

from trainer.core import arguments
from trainer.core.errors import wrong_type
from trainer.core.types import ArrayLike
from trainer.losses.shapes import as_array
from trainer.metrics.arrays import divide_no_nan, full_weights, sums_by_bucket
from trainer.metrics.base import Metric

SMALLEST_UNION = 1e-9


class IoU(Metric):
    """The mean over classes of `true_positives / (true_positives + false_positives + false_negatives)`.

    Classes without any label or prediction are excluded from the mean. Samples whose label or prediction is not a
    class are ignored. The confusion matrix is float32, so that fractional weights are exact.

    Args:
      num_classes: number of classes.
      target_class_ids: classes to average over.
      name: see `Metric`.
      dtype: dtype of the result; float32 if None.
      ignore_class: a label whose samples are ignored, such as 255.
      sparse_y_true: whether labels are class indices, rather than class scores.
      sparse_y_pred: whether predictions are class indices, rather than class scores.
      axis: axis of class scores.

    Raises:
      TypeError: if `num_classes` is not an integer.
      ValueError: if a target class is outside `[0, num_classes)`, or there is none. In updates, if the
        numbers of labels and predictions differ, or the scores have another number of classes.

    >>> round(float(IoU(num_classes=2, target_class_ids=[0])([0, 0, 1, 1], [0, 1, 0, 1])), 4)
    0.3333
    """

    direction = "max"

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: DTypeLike | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ):
        if isinstance(target_class_ids, str) or not isinstance(target_class_ids, Collection):
            raise wrong_type("target_class_ids", target_class_ids, "a list of classes")
        arguments.check_count("num_classes", num_classes)
        outside = [target for target in target_class_ids if not 0 <= target < num_classes]
        if outside:
            raise ValueError(f"Target class id {max(outside)} is out of range, which is [0, {num_classes}).")
        if len(target_class_ids) == 0:
            raise ValueError("`target_class_ids` must be at least one class. Received: none.")
        super().__init__(dtype, name)
        self.num_classes = num_classes
        self.target_class_ids = list(target_class_ids)
        self.ignore_class = ignore_class
        self.sparse_y_true = sparse_y_true
        self.sparse_y_pred = sparse_y_pred
        self.axis = axis
        self.total_cm = self.add_variable((num_classes, num_classes), name="total_confusion_matrix")

    def validate(self, y_true: jax.Array, y_pred: jax.Array) -> None:
        if self._count("y_true", y_true, self.sparse_y_true) != self._count("y_pred", y_pred, self.sparse_y_pred):
            raise ValueError(f"`y_true` and `y_pred` must name one class for each other. Received: y_true.shape="
                             f"{tuple(y_true.shape)}, y_pred.shape={tuple(y_pred.shape)}. Where one of them holds "
                             f"scores of classes, give `sparse_y_true=False` or `sparse_y_pred=False`.")

    def _count(self, argument: str, values: Any, is_sparse: bool) -> int:
        """Returns the number of labels or predictions; raises ValueError if scores have another number of classes."""
        shape = tuple(values.shape)
        if is_sparse:
            return math.prod(shape)
        axis = normalize_axis_index(self.axis, len(shape))
        if shape[axis] != self.num_classes:
            raise ValueError(f"`{argument}` must hold scores of num_classes={self.num_classes} classes on axis "
                             f"{self.axis}. Received: {argument}.shape={shape}. Give `num_classes={shape[axis]}`, or "
                             "the `axis` of the scores.")
        return math.prod(shape[:axis] + shape[axis + 1:])

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Accumulates the confusion matrix of a batch.

        Args:
          y_true: class indices, `(n, ...)`, or class scores if not `sparse_y_true`.
          y_pred: predictions, likewise.
          sample_weight: a scalar, or one weight per row or per label.

        Raises:
          ValueError: see `IoU`.
        """
        y_true, y_pred = as_array(y_true), as_array(y_pred)
        self.validate(y_true, y_pred)
        labels = y_true if self.sparse_y_true else jnp.argmax(y_true, axis=self.axis)
        predictions = y_pred if self.sparse_y_pred else jnp.argmax(y_pred, axis=self.axis)
        weights = full_weights(labels, sample_weight).ravel()
        labels, predictions = labels.ravel().astype(jnp.int32), predictions.ravel().astype(jnp.int32)
        counts = self._is_class(labels) & self._is_class(predictions)
        if self.ignore_class is not None:
            counts &= labels != self.ignore_class
        cells = jnp.where(counts, labels * self.num_classes + predictions, 0)
        matrix = sums_by_bucket(jnp.where(counts, weights, 0.0)[:, None], cells[:, None], self.num_classes**2)
        self.total_cm.assign_add(matrix.reshape(self.total_cm.shape))

    def _is_class(self, indices: jax.Array) -> jax.Array:
        return (indices >= 0) & (indices < self.num_classes)

    def result(self) -> jax.Array:
        """Returns the mean over the target classes, a scalar; 0 if none of the classes was seen."""
        matrix = self.total_cm.value
        targets = jnp.asarray(self.target_class_ids)
        intersection = jnp.diag(matrix)[targets]
        union = (matrix.sum(axis=0) + matrix.sum(axis=1))[targets] - intersection
        # As in Keras, also excludes a union that is negative because of negative weights.
        is_seen = union > SMALLEST_UNION
        shares = jnp.where(is_seen, divide_no_nan(intersection, union), 0.0)
        return divide_no_nan(jnp.sum(shares), jnp.count_nonzero(is_seen)).astype(self.dtype)


class BinaryIoU(IoU):
    """`IoU` of two classes, for predictions that are probabilities of class 1.

    Args:
      target_class_ids: classes to average over.
      threshold: probabilities of at least this value predict class 1.
      name: see `Metric`.
      dtype: see `IoU`.

    >>> round(float(BinaryIoU(threshold=0.3)([0, 1, 0, 1], [0.1, 0.2, 0.4, 0.7])), 4)
    0.3333
    """

    def __init__(
        self,
        target_class_ids: Sequence[int] = (0, 1),
        threshold: float = 0.5,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ):
        arguments.require_number(threshold=threshold)
        super().__init__(2, target_class_ids, name, dtype)
        self.threshold = threshold

    def update_state(self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        super().update_state(y_true, as_array(y_pred) >= self.threshold, sample_weight)


class MeanIoU(IoU):
    """`IoU` over all classes; see `IoU` for the arguments.

    >>> round(float(MeanIoU(num_classes=2)([0, 0, 1, 1], [0, 1, 0, 1])), 4)
    0.3333
    """

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ):
        targets = range(arguments.as_count("num_classes", num_classes))
        super().__init__(
            num_classes, targets, name, dtype, ignore_class, sparse_y_true, sparse_y_pred, axis)


class OneHotIoU(IoU):
    """`IoU` with one-hot labels; see `IoU` for the arguments.

    >>> round(float(OneHotIoU(num_classes=2, target_class_ids=[1])([[1, 0], [0, 1]], [[0.2, 0.8], [0.1, 0.9]])), 4)
    0.5
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: DTypeLike | None = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ):
        super().__init__(num_classes, target_class_ids, name, dtype, ignore_class, False, sparse_y_pred, axis)


class OneHotMeanIoU(MeanIoU):
    """`MeanIoU` with one-hot labels; see `IoU` for the arguments.

    >>> float(OneHotMeanIoU(num_classes=2)([[1, 0], [0, 1]], [[0.2, 0.8], [0.1, 0.9]]))
    0.25
    """

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ):
        super().__init__(num_classes, name, dtype, ignore_class, False, sparse_y_pred, axis)
