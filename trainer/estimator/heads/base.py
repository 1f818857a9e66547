"""The base class of heads, and shared checks of labels.

Owns names, row weights and the spec of an estimator. A head works on arrays and does not depend on strategies or loops.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import arguments, errors
from trainer.core.types import ArrayLike, PyTree
from trainer.engine.model.types import ModuleLike, Optimizers
from trainer.estimator.feature_columns.numeric import NumericColumn
from trainer.estimator.training.spec import EstimatorSpec, Mode
from trainer.losses import Loss
from trainer.metrics import Metric

LossReduction = Literal["sum_over_batch_size", "sum"]
WeightColumn: TypeAlias = str | NumericColumn | None
LossFn = Callable[[jax.Array, jax.Array], jax.Array]
"""A function `(labels, logits)` that returns a loss per row, of shape (rows,) or (rows, 1)."""


class HeadLoss(Loss):
    """The loss of a head, from labels and logits.

    Args:
      values_fn: function `(labels, logits)` that returns values of shape (rows,).
      reduction: as in `Loss`.
    """

    def __init__(self, values_fn: LossFn, reduction: str):
        super().__init__(reduction=reduction, name="loss")
        self._values_fn = values_fn

    def call(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return self._values_fn(y_true, y_pred)


class Head(abc.ABC):
    """Base class of heads: loss, metrics, predictions and label encoding of a task, from logits.

    Args:
      weight_column: name of the feature with the weight of each row, for the loss and the metrics; None for no weights.
      loss_reduction: "sum_over_batch_size" divides the weighted sum of a batch's losses by the number of rows; "sum"
        does not.
      loss_fn: replacement for the task's loss.
      name: suffix of the names of metrics and predictions, as in "accuracy/<name>"; None for no suffix.

    Raises:
      ValueError: if `loss_reduction` is unknown.
      TypeError: if an argument has the wrong type.

    Source: https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/Head
    """

    def __init__(self, weight_column: WeightColumn = None, loss_reduction: LossReduction = "sum_over_batch_size",
                 loss_fn: LossFn | None = None, name: str | None = None):
        if loss_reduction not in ("sum_over_batch_size", "sum"):
            raise errors.unknown_name("loss_reduction", str(loss_reduction), ["sum_over_batch_size", "sum"])
        if loss_fn is not None and not callable(loss_fn):
            raise errors.wrong_type("loss_fn", loss_fn, "a function (labels, logits), or None")
        weight_key = getattr(weight_column, "key", weight_column)
        if weight_key is not None and not isinstance(weight_key, str):
            raise errors.wrong_type("weight_column", weight_column, "the name of a feature, a numeric column, or None")
        if name is not None:
            arguments.require_text(name=name)
        self.weight_key: str | None = weight_key
        self.loss_reduction = loss_reduction
        self.name = name
        self._loss_fn = loss_fn

    # --- defined by each head ----------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """Number of logits per row."""

    @property
    def label_width(self) -> int:
        """Number of values per encoded label."""
        return 1

    @abc.abstractmethod
    def losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns a loss per row, of shape (rows,)."""

    @abc.abstractmethod
    def metrics(self) -> list[Metric]:
        """Returns new metrics of labels and logits, weighted by row."""

    @abc.abstractmethod
    def predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        """Returns the predictions of `predict`, before `decoded` adds class names."""

    @abc.abstractmethod
    def encoded_labels(self, labels: PyTree) -> np.ndarray:
        """Returns labels in the form that the loss expects.

        Raises:
          ValueError: if a label is invalid for the task.
        """

    def decoded(self, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns predictions with entries that only the host can compute, such as class names."""
        return dict(predictions)

    # --- shared by all heads ------------------------------------------------------------------------------------------

    def loss(self) -> Loss:
        """Returns the loss for `Model.compile`."""
        return HeadLoss(self.row_losses, self.loss_reduction)

    def row_losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns a loss per row, from `loss_fn` if given and from the task otherwise."""
        self._check_logits(logits)
        if self._loss_fn is None:
            return self.losses(labels, logits)
        values = self._loss_fn(labels, logits)
        if jnp.shape(values) not in ((logits.shape[0],), (logits.shape[0], 1)):
            raise ValueError("`loss_fn` must return the loss of each row, of shape "
                             f"({logits.shape[0]},) or ({logits.shape[0]}, 1). Received: shape {jnp.shape(values)}.")
        return values.reshape(logits.shape[0])

    def create_estimator_spec(self, mode: Mode, module: ModuleLike, optimizer: Optimizers | None = None,
                              **options: Any) -> EstimatorSpec:
        """Returns the spec of a module that outputs the logits of the head.

        Args:
          mode: mode of the `model_fn` call.
          module: Flax module from features to logits of shape (rows, logits_dimension).
          optimizer: as in `Model.compile`; required for training.
          **options: additional arguments of `EstimatorSpec`.
        """
        options = {"batch_map": lambda features, labels: (features, *self.labels_and_weights(features, labels)),
                   **options}
        return EstimatorSpec(
            mode, module=module, loss=self.loss(), optimizer=optimizer, weighted_metrics=self.metrics(),
            predictions=self._checked_predictions, decode_predictions=self.decoded, **options)

    def _check_logits(self, logits: object) -> None:
        """Raises ValueError if the logits do not have the shape (rows, logits_dimension)."""
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != 2 or shape[1] != self.logits_dimension:
            raise ValueError(f"The module must return the logits of {type(self).__name__}, of shape (rows, "
                             f"{self.logits_dimension}). Received: {errors.describe(logits)}. Give its last layer "
                             f"{self.logits_dimension} units, `head.logits_dimension`.")

    def _checked_predictions(self, logits: jax.Array) -> dict[str, jax.Array]:
        self._check_logits(logits)
        return self.predictions(logits)

    def labels_and_weights(self, features: PyTree, labels: PyTree) -> tuple[np.ndarray, ...]:
        """Returns a batch's encoded labels, and the row weights if there are any."""
        if labels is None:
            return ()
        encoded = self.encoded_labels(labels)
        weights = self.weights(features, len(encoded))
        return (encoded,) if weights is None else (encoded, weights)

    def key(self, name: str) -> str:
        """Returns a name with the suffix of the head."""
        return f"{name}/{self.name}" if self.name else name

    def weights(self, features: PyTree, rows: int) -> np.ndarray | None:
        """Returns the row weights of a batch, float32 of shape (rows,); None without a `weight_column`.

        Raises:
          ValueError: if the feature is missing, is not numeric, or does not have one value per row.
        """
        if self.weight_key is None:
            return None
        if not isinstance(features, Mapping):
            raise ValueError(f"`weight_column` names the feature {self.weight_key!r}: features must be a dict by name. "
                             f"Received: {errors.describe(features)}.")
        if self.weight_key not in features:
            raise ValueError(f"`weight_column` names the feature {self.weight_key!r}, which is missing. "
                             f"{errors.near_hint(self.weight_key, features)}")
        weights = np.asarray(features[self.weight_key])
        if weights.dtype.kind not in "buif":
            raise ValueError(f"`weight_column` {self.weight_key!r} must have numbers. Received: dtype {weights.dtype}.")
        weights = weights.astype(np.float32)
        if weights.size != rows:
            raise ValueError(f"`weight_column` {self.weight_key!r} must have one number for each of {rows} rows. "
                             f"Received: shape {weights.shape}.")
        return weights.reshape(rows)


def check_head(head: object) -> Head:
    """Returns a head; raises TypeError for any other object."""
    if not isinstance(head, Head):
        raise errors.wrong_type("head", head, "a head of `trainer.estimator`, such as `RegressionHead()`")
    return head


def as_column(labels: ArrayLike, dtype: type, width: int, what: str) -> np.ndarray:
    """Returns labels as an array of shape (rows, width).

    Raises:
      ValueError: if the labels have another shape or are not numbers.
    """
    array = np.asarray(labels)
    if array.dtype.kind not in "buif":
        raise ValueError(f"{what} must be numbers. Received: dtype {array.dtype}. For text, give `label_vocabulary`.")
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{what} must have the shape (rows, {width}). Received: shape {array.shape}.")
    return array.astype(dtype)


def class_ids(labels: ArrayLike, n_classes: int, vocabulary: Sequence[str] | None) -> np.ndarray:
    """Returns labels as int32 class ids, of shape (rows, 1).

    Args:
      labels: class ids, or names in `vocabulary`, of shape (rows,) or (rows, 1).
      n_classes: number of classes.
      vocabulary: class names.

    Raises:
      ValueError: if a label is not a class.
    """
    array = np.asarray(labels)
    if vocabulary is None:
        column = as_column(array, np.float64, 1, "Labels")
        wrong = column[(column < 0) | (column >= n_classes) | (column != np.floor(column))]
        if wrong.size:
            raise ValueError(f"Labels must be whole numbers from 0 to n_classes - 1 = {n_classes - 1}. Received: "
                             f"{wrong.ravel()[0]:g}.")
        return column.astype(np.int32)
    if array.dtype.kind not in "USO":
        raise ValueError("Labels must be text, as there is a `label_vocabulary`. Received: dtype "
                         f"{array.dtype}. Leave the vocabulary out for numbers.")
    numbers = {name: number for number, name in enumerate(vocabulary)}
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in array.ravel().tolist()]
    unknown = next((name for name in names if name not in numbers), None)
    if unknown is not None:
        raise ValueError(f"The label {unknown!r} is not in `label_vocabulary`. {errors.near_hint(unknown, numbers)}")
    return np.array([numbers[name] for name in names], np.int32).reshape(-1, 1)


def checked_thresholds(thresholds: Sequence[float] | None) -> tuple[float, ...]:
    """Returns thresholds as a tuple, empty for None; raises an error unless each is between 0 and 1."""
    if thresholds is not None and (isinstance(thresholds, str) or not isinstance(thresholds, Iterable)):
        raise errors.wrong_type("thresholds", thresholds, "a list of numbers between 0 and 1, or None")
    for threshold in thresholds or ():
        arguments.require({"thresholds": threshold}, "numbers between 0 and 1", lambda value: 0 < value < 1)
    return tuple(thresholds or ())


def checked_vocabulary(vocabulary: object, n_classes: int) -> list[str] | None:
    """Returns a vocabulary with one name per class; None without a vocabulary."""
    if vocabulary is None:
        return None
    if isinstance(vocabulary, str | bytes) or not isinstance(vocabulary, list | tuple | np.ndarray):
        raise errors.wrong_type("label_vocabulary", vocabulary, "a list of names, or None")
    names = [name.decode() if isinstance(name, bytes) else name for name in vocabulary]
    if any(not isinstance(name, str) for name in names):
        raise ValueError("`label_vocabulary` must be names, as text. Leave it out for numbers.")
    if len(set(names)) < len(names):
        raise ValueError("`label_vocabulary` must have names that differ. Received: one that is there twice.")
    if len(names) != n_classes:
        raise ValueError(f"Length of label_vocabulary must be n_classes ({n_classes}). Given: {len(names)}.")
    return names


def names_of_classes(ids: np.ndarray, n_classes: int, vocabulary: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Returns class names for a classifier's predictions, as bytes, as in TensorFlow.

    Args:
      ids: class ids, of shape (rows, 1).
      n_classes: number of classes.
      vocabulary: class names; the class ids by default.
    """
    names = np.array([name.encode() for name in vocabulary or map(str, range(n_classes))], object)
    rows = len(ids)
    return {"classes": names[ids], "all_class_ids": np.tile(np.arange(n_classes, dtype=np.int32), (rows, 1)),
            "all_classes": np.tile(names, (rows, 1))}
