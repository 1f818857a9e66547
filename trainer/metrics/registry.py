"""The registry of metrics, for `compile(metrics=[...])`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer import losses
from trainer.core import configs
from trainer.core.errors import named_in_errors, see, unknown_name
from trainer.core.registry import Registry
from trainer.core.types import PyTree, keras_class
from trainer.losses import Loss, as_loss
from trainer.losses import registry as loss_registry
from trainer.losses.base import FunctionLoss
from trainer.losses.label_functions import check_takes_labels_first
from trainer.metrics import (
    accuracies,
    auc,
    calibration,
    classification,
    confusion,
    correlation,
    f_score,
    iou,
    operating_point,
    r2,
    reduction,
    regression,
)
from trainer.metrics.adapted import adapted, check_is_object, is_of_another_library
from trainer.metrics.arrays import one_hot_advice
from trainer.metrics.base import Metric, is_builtin, snake_case

CLASSES: tuple[type[Metric], ...] = (
    reduction.Mean,
    reduction.Sum,
    accuracies.Accuracy,
    accuracies.BinaryAccuracy,
    accuracies.CategoricalAccuracy,
    accuracies.SparseCategoricalAccuracy,
    accuracies.TopKCategoricalAccuracy,
    accuracies.SparseTopKCategoricalAccuracy,
    classification.BinaryCrossentropy,
    classification.CategoricalCrossentropy,
    classification.SparseCategoricalCrossentropy,
    classification.KLDivergence,
    classification.Poisson,
    regression.MeanSquaredError,
    regression.RootMeanSquaredError,
    regression.MeanAbsoluteError,
    regression.MeanAbsolutePercentageError,
    regression.MeanSquaredLogarithmicError,
    regression.LogCoshError,
    regression.CosineSimilarity,
    r2.R2Score,
    correlation.PearsonCorrelation,
    correlation.ConcordanceCorrelation,
    classification.Hinge,
    classification.SquaredHinge,
    classification.CategoricalHinge,
    confusion.TruePositives,
    confusion.FalsePositives,
    confusion.TrueNegatives,
    confusion.FalseNegatives,
    confusion.Precision,
    confusion.Recall,
    operating_point.SensitivityAtSpecificity,
    operating_point.SpecificityAtSensitivity,
    operating_point.PrecisionAtRecall,
    operating_point.RecallAtPrecision,
    auc.AUC,
    calibration.ExpectedCalibrationError,
    f_score.FBetaScore,
    f_score.F1Score,
    iou.IoU,
    iou.BinaryIoU,
    iou.MeanIoU,
    iou.OneHotIoU,
    iou.OneHotMeanIoU,
)

_SHORT_NAMES: dict[str, type[Metric]] = {
    "bce": classification.BinaryCrossentropy,
    "mse": regression.MeanSquaredError,
    "mae": regression.MeanAbsoluteError,
    "mape": regression.MeanAbsolutePercentageError,
    "msle": regression.MeanSquaredLogarithmicError,
}

_BY_NAME: dict[str, type[Metric]] = {
    **{cls.__name__: cls for cls in CLASSES},
    **{snake_case(cls.__name__): cls for cls in CLASSES},
    **_SHORT_NAMES,
    **{name.upper(): cls for name, cls in _SHORT_NAMES.items()},
}

# The functions in configurations of wrappers and from Keras's `serialize`.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{cls.function.__name__: cls.function for cls in loss_registry.CLASSES},
    **{function.__name__: function for module in (accuracies, correlation) for function in vars(module).values()
       if inspect.isfunction(function) and function.__module__ == module.__name__},
}

MetricOrFunction = Metric | Callable[[Any, Any], Any]
_REGISTRY: Registry[MetricOrFunction] = Registry(
    "metric", Metric, "metrics",
    {**_BY_NAME, "MeanMetricWrapper": reduction.MeanMetricWrapper, "LossMetric": reduction.LossMetric}, _FUNCTIONS,
    argument="metrics", expected="the name of a metric, a function of (y_true, y_pred) or a `Metric`")

_OF_YES_OR_NO = (accuracies.BinaryAccuracy, auc.AUC, f_score.FBetaScore, confusion.ConfusionMetric)
_OF_CLASS_INDICES = (accuracies.sparse_categorical_accuracy, accuracies.sparse_top_k_categorical_accuracy)

# The names of a binary, a categorical and a sparse metric. The shapes determine the choice.
_ACCURACIES = (accuracies.BinaryAccuracy, accuracies.CategoricalAccuracy, accuracies.SparseCategoricalAccuracy)
_CROSSENTROPIES = (classification.BinaryCrossentropy, classification.CategoricalCrossentropy,
                   classification.SparseCategoricalCrossentropy)
_BY_SHAPES: dict[str, tuple[type[Metric], type[Metric], type[Metric]]] = {
    "accuracy": _ACCURACIES,
    "acc": _ACCURACIES,
    "crossentropy": _CROSSENTROPIES,
    "ce": _CROSSENTROPIES,
}


def get(identifier: object) -> Metric | None:
    """Returns the metric for an identifier.

    Args:
      identifier: the name of a metric ("mse", "mean_squared_error", "MeanSquaredError"); a `Metric`, which is returned
        unchanged; a metric class without required arguments; a loss; a function of `(y_true, y_pred)`, which becomes
        the mean of its values under the function's name; a configuration from `serialize`; a metric of clu, metrax or
        `nnx.metrics`; or None, which gives None.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `identifier` is not a metric.

    >>> get("mse").name
    'mean_squared_error'
    """
    return None if identifier is None else _found(identifier)


def _found(identifier: Any) -> Metric:
    if configs.is_config(identifier):
        identifier = deserialize(identifier)
    if isinstance(identifier, str):
        known = configs.with_custom_objects(_BY_NAME)
        if identifier not in known:
            raise _unknown(identifier)
        identifier = known[identifier]
    check(identifier)
    if is_of_another_library(identifier):
        return adapted(identifier)
    if isinstance(identifier, type):
        return identifier()
    if isinstance(identifier, Metric):
        return identifier
    if isinstance(identifier, Loss):
        return reduction.LossMetric(identifier)
    loss = as_loss(identifier)
    if isinstance(loss, FunctionLoss):
        return reduction.MeanMetricWrapper(identifier, loss.name)
    return reduction.LossMetric(loss)


def serialize(metric: MetricOrFunction) -> dict[str, Any]:
    """Returns the configuration of a metric or a function, in Keras's format.

    >>> serialize(accuracies.BinaryAccuracy(threshold=0.3))["config"]
    {'name': 'binary_accuracy', 'dtype': 'float32', 'threshold': 0.3}
    """
    return _REGISTRY.serialize(metric)


def deserialize(
    config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> MetricOrFunction:
    """Returns the metric or the function for a configuration from `serialize`, of this package or of Keras.

    Args:
      config: the configuration, or the name of a class or a function.
      custom_objects: custom classes and functions, by name.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if `config` is not a configuration.

    >>> deserialize(serialize(accuracies.BinaryAccuracy(threshold=0.3))).threshold
    0.3
    """
    return _REGISTRY.deserialize(config, custom_objects)


def check(identifier: object) -> None:
    """Raises the errors of `resolve` for unknown names and invalid types, before shapes are known.

    >>> check("accuracy")
    """
    if isinstance(identifier, str):
        if identifier not in configs.with_custom_objects(_BY_NAME) and identifier.lower() not in _BY_SHAPES:
            raise _unknown(identifier)
    elif is_of_another_library(identifier) or configs.is_config(identifier):
        return
    elif isinstance(identifier, type):
        check_is_object(identifier)
        if not issubclass(identifier, Metric):
            raise _REGISTRY.wrong(identifier)
    elif keras_class(identifier, "Metric") or not (isinstance(identifier, (Metric, Loss)) or callable(identifier)):
        raise _REGISTRY.wrong(identifier)
    elif not isinstance(identifier, (Metric, Loss)):
        check_takes_labels_first("metric", identifier)


def _unknown(name: str) -> ValueError:
    return unknown_name("metric", name, [*configs.with_custom_objects(_BY_NAME), *_BY_SHAPES])


def resolve(
    identifier: object, y_true: PyTree, y_pred: PyTree, loss: object = None, output: str | None = None
) -> Metric:
    """Returns the metric for an identifier, validated and built for labels and predictions.

    As in Keras, "accuracy" and "acc" are binary for predictions of a single number, sparse for labels without the axis
    of classes, and categorical otherwise. "crossentropy" and "ce" follow the same rule.

    Args:
      identifier: see `get`. A string also becomes the metric's name.
      y_true: labels: anything with `shape` and `dtype`, such as `jax.ShapeDtypeStruct`.
      y_pred: predictions, likewise.
      loss: the loss of this output, which sets `from_logits` of a crossentropy chosen by shapes.
      output: the name of this output, if the model has several, for errors.

    Raises:
      ValueError: if the name is unknown, if the metric takes values instead of labels and predictions, such as `Mean`,
        or if the shapes are invalid.
      TypeError: if `identifier` is not a metric.

    >>> import jax
    >>> labels, scores = jax.ShapeDtypeStruct((8,), "int32"), jax.ShapeDtypeStruct((8, 10), "float32")
    >>> resolve("acc", labels, scores)
    <SparseCategoricalAccuracy name=acc>
    """
    kind = identifier.lower() if isinstance(identifier, str) else None
    if kind in _BY_SHAPES:
        chosen = _choose_by_shapes(_BY_SHAPES[kind], y_true, y_pred)
        from_logits = getattr(loss, "from_logits", False)
        metric = chosen(from_logits=from_logits) if chosen in _CROSSENTROPIES else chosen()
    else:
        metric = _found(identifier)
    _check_takes_labels(metric)
    if isinstance(identifier, str):
        metric.name = identifier
    with named_in_errors("metric", metric.name, output, y_true, y_pred):
        try:
            metric.validate(y_true, y_pred)
            metric.build(y_true, y_pred)
        except ValueError as error:
            says_enough = type(metric) is accuracies.Accuracy or "to_categorical" in str(error)
            advice = "" if says_enough else one_hot_advice(y_true, y_pred)
            raise ValueError(f"The metric {metric.name!r} cannot take these labels and predictions: {error}"
                             f"{advice and ' ' + advice}") from error
    _warn_of_logits(metric, loss)
    if type(metric) is accuracies.Accuracy and jnp.issubdtype(y_pred.dtype, jnp.floating):
        warnings.warn(f"The metric {metric.name!r} counts outputs that equal their labels, and the outputs are floats, "
                      "such as probabilities, which hardly ever do. For probabilities or logits of classes use "
                      "`metrics=[\"accuracy\"]`.", UserWarning, stacklevel=2)
    return metric


def _warn_of_logits(metric: Metric, loss: object) -> None:
    if takes_half_for_yes(metric) and getattr(loss, "from_logits", False) and isinstance(
            loss, (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy)):
        warnings.warn(f"The metric {metric.name!r} takes predictions above 0.5 for yes, but the loss {loss.name!r} has "
                      f"from_logits=True, and logits above 0 mean yes. Use {for_logits(metric)}. {see('logits')}",
                      UserWarning, stacklevel=2)


def takes_half_for_yes(metric: Metric) -> bool:
    """Returns whether a metric takes predictions above 0.5, its default, for yes.

    >>> takes_half_for_yes(accuracies.BinaryAccuracy()), takes_half_for_yes(accuracies.BinaryAccuracy(threshold=0.0))
    (True, False)
    """
    if type(metric) not in CLASSES:  # a subclass may take logits
        return False
    if isinstance(metric, accuracies.BinaryAccuracy):
        return metric.threshold == 0.5
    return isinstance(metric, confusion.ConfusionMetric) and metric.thresholds == [0.5]


def for_logits(metric: Metric) -> str:
    """Returns the call that makes a metric of `takes_half_for_yes` for logits, for messages.

    >>> for_logits(confusion.Recall())
    '`trainer.metrics.Recall(thresholds=0.0, name="recall")`'
    """
    argument = "threshold" if isinstance(metric, accuracies.BinaryAccuracy) else "thresholds"
    return f'`trainer.metrics.{type(metric).__name__}({argument}=0.0, name="{metric.name}")`'


def takes_class_indices(metric: Metric) -> bool:
    """Returns whether the labels of a metric of this package are class indices.

    >>> takes_class_indices(accuracies.SparseCategoricalAccuracy()), takes_class_indices(accuracies.BinaryAccuracy())
    (True, False)
    """
    if isinstance(metric, reduction.LossMetric):
        return metric.loss.sparse_labels
    if isinstance(metric, iou.IoU):
        return is_builtin(metric) and metric.sparse_y_true
    return is_builtin(metric) and (
        isinstance(metric, accuracies.IndexAccuracy) or getattr(metric, "_function", None) in _OF_CLASS_INDICES)


def highest_label(taker: Loss | Metric, shape: tuple[int, ...]) -> int | None:
    """Returns the largest label, counted from 0, that a loss or a metric of this package takes; None if it takes any.

    Args:
      taker: the loss or the metric.
      shape: the shape of the predictions.

    >>> highest_label(accuracies.SparseCategoricalAccuracy(), (8, 10)), highest_label(accuracies.BinaryAccuracy(), (8,))
    (9, 1)
    """
    if isinstance(taker, reduction.LossMetric):
        taker = taker.loss
    if isinstance(taker, (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy)):
        return 1
    if isinstance(taker, Loss):
        return shape[getattr(taker, "axis", -1)] - 1 if taker.sparse_labels else None
    if isinstance(taker, iou.IoU):
        return taker.num_classes - 1 if takes_class_indices(taker) else None
    if takes_class_indices(taker):
        return None if getattr(taker, "from_sorted_ids", False) else shape[-1] - 1
    return 1 if isinstance(taker, _OF_YES_OR_NO) and is_builtin(taker) else None


def _check_takes_labels(metric: Metric) -> None:
    parameters = list(inspect.signature(metric.update_state).parameters)
    if parameters[1:2] == ["sample_weight"]:
        # It would take labels as values, and predictions as their weights.
        raise ValueError(f"The metric {metric.name!r} accumulates values, not labels and predictions. Received: a "
                         f"{type(metric).__name__} with update_state({', '.join(parameters)}). Give a function of "
                         "(y_true, y_pred), whose mean is taken, or a metric with update_state(y_true, y_pred, "
                         "sample_weight).")


def _choose_by_shapes(
    choices: tuple[type[Metric], type[Metric], type[Metric]],
    y_true: jax.Array | jax.ShapeDtypeStruct, y_pred: jax.Array | jax.ShapeDtypeStruct,
) -> type[Metric]:
    binary, categorical, sparse = choices
    if len(y_pred.shape) < 2 or y_pred.shape[-1] == 1:
        return binary
    if len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1:
        return sparse
    return categorical
