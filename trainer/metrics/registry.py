"""Finds a metric by its name, as `compile(metrics=[...])` takes it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from trainer import losses
from trainer.core import configs
from trainer.core.errors import see, unknown_name, wrong_type
from trainer.losses import Loss, as_loss
from trainer.losses import registry as loss_registry
from trainer.losses.base import FunctionLoss
from trainer.metrics import accuracies, correlation
from trainer.metrics.accuracies import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from trainer.metrics.adapted import adapted, check_is_object, is_of_another_library
from trainer.metrics.arrays import one_hot_advice
from trainer.metrics.auc import AUC
from trainer.metrics.base import Metric, named_in_errors, snake_case
from trainer.metrics.classification import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    CategoricalHinge,
    Hinge,
    KLDivergence,
    Poisson,
    SparseCategoricalCrossentropy,
    SquaredHinge,
)
from trainer.metrics.confusion import (
    FalseNegatives,
    FalsePositives,
    Precision,
    Recall,
    TrueNegatives,
    TruePositives,
)
from trainer.metrics.correlation import ConcordanceCorrelation, PearsonCorrelation
from trainer.metrics.f_score import F1Score, FBetaScore
from trainer.metrics.iou import BinaryIoU, IoU, MeanIoU, OneHotIoU, OneHotMeanIoU
from trainer.metrics.operating_point import (
    PrecisionAtRecall,
    RecallAtPrecision,
    SensitivityAtSpecificity,
    SpecificityAtSensitivity,
)
from trainer.metrics.r2 import R2Score
from trainer.metrics.reduction import LossMetric, Mean, MeanMetricWrapper, Sum
from trainer.metrics.regression import (
    CosineSimilarity,
    LogCoshError,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    RootMeanSquaredError,
)

CLASSES: tuple[type[Metric], ...] = (
    Mean,
    Sum,
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    TopKCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    BinaryCrossentropy,
    CategoricalCrossentropy,
    SparseCategoricalCrossentropy,
    KLDivergence,
    Poisson,
    MeanSquaredError,
    RootMeanSquaredError,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredLogarithmicError,
    LogCoshError,
    CosineSimilarity,
    R2Score,
    PearsonCorrelation,
    ConcordanceCorrelation,
    Hinge,
    SquaredHinge,
    CategoricalHinge,
    TruePositives,
    FalsePositives,
    TrueNegatives,
    FalseNegatives,
    Precision,
    Recall,
    SensitivityAtSpecificity,
    SpecificityAtSensitivity,
    PrecisionAtRecall,
    RecallAtPrecision,
    AUC,
    FBetaScore,
    F1Score,
    IoU,
    BinaryIoU,
    MeanIoU,
    OneHotIoU,
    OneHotMeanIoU,
)

_SHORT_NAMES: dict[str, type[Metric]] = {
    "bce": BinaryCrossentropy,
    "mse": MeanSquaredError,
    "mae": MeanAbsoluteError,
    "mape": MeanAbsolutePercentageError,
    "msle": MeanSquaredLogarithmicError,
}

_BY_NAME: dict[str, type[Metric]] = {
    **{cls.__name__: cls for cls in CLASSES},
    **{snake_case(cls.__name__): cls for cls in CLASSES},
    **_SHORT_NAMES,
    **{name.upper(): cls for name, cls in _SHORT_NAMES.items()},
}

# What a wrapper's configuration, and Keras's `serialize` of a function, names.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{cls.function.__name__: cls.function for cls in loss_registry.CLASSES},
    **{function.__name__: function for module in (accuracies, correlation) for function in vars(module).values()
       if inspect.isfunction(function) and function.__module__ == module.__name__},
}

# The names that stand for a binary, a categorical and a sparse metric: the shapes decide which.
_ACCURACIES = (BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy)
_CROSSENTROPIES = (BinaryCrossentropy, CategoricalCrossentropy, SparseCategoricalCrossentropy)
_BY_SHAPES: dict[str, tuple[type[Metric], type[Metric], type[Metric]]] = {
    "accuracy": _ACCURACIES,
    "acc": _ACCURACIES,
    "crossentropy": _CROSSENTROPIES,
    "ce": _CROSSENTROPIES,
}


def get(identifier: Any) -> Metric | None:
    """Returns the metric that `identifier` names.

    Args:
      identifier: the name of a metric ("mse", "mean_squared_error", "MeanSquaredError"), a `Metric`, which is
        returned as it is, a class of metrics without further arguments, a loss, or a function of `(y_true, y_pred)`,
        which becomes the mean of its values under the function's name; a configuration, as `serialize` returns it; a
        metric of clu, metrax or `nnx.metrics`; or None, for which None is returned.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is no metric.

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
        return LossMetric(identifier)
    loss = as_loss(identifier)
    if isinstance(loss, FunctionLoss):
        return MeanMetricWrapper(identifier, loss.name)
    return LossMetric(loss)


def serialize(metric: Metric | Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Returns a metric or a function as plain data, in Keras's form.

    >>> serialize(BinaryAccuracy(threshold=0.3))["config"]
    {'name': 'binary_accuracy', 'dtype': 'float32', 'threshold': 0.3}
    """
    config: dict[str, Any] = configs.to_config(metric, "metrics")
    return config


def deserialize(
    config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> Metric | Callable[[Any, Any], Any]:
    """Returns the metric or the function that `serialize`, or that of Keras, has made plain data of.

    Args:
      config: the configuration, or the name of a class or a function.
      custom_objects: classes and functions of your own, by name.

    Raises:
      ValueError: for an unknown name.
      TypeError: for what is no configuration.

    >>> deserialize(serialize(BinaryAccuracy(threshold=0.3))).threshold
    0.3
    """
    known = {**_FUNCTIONS, **_BY_NAME, "MeanMetricWrapper": MeanMetricWrapper, "LossMetric": LossMetric}
    if configs.is_config(config) and config["class_name"] == "function":  # type: ignore[index]
        known.update(_FUNCTIONS)
    metric: Metric | Callable[[Any, Any], Any] = configs.from_config(
        "metric", Metric, config, known, custom_objects)
    return metric


def check(identifier: Any) -> None:
    """Raises what `resolve` raises for an unknown name, or for anything that is no metric, before shapes are known.

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
            raise _not_a_metric(identifier)
    elif not isinstance(identifier, (Metric, Loss)) and not callable(identifier):
        raise _not_a_metric(identifier)


def _unknown(name: str) -> ValueError:
    return unknown_name("metric", name, [*configs.with_custom_objects(_BY_NAME), *_BY_SHAPES])


def _not_a_metric(received: Any) -> TypeError:
    return wrong_type("metrics", received, "the name of a metric, a function of (y_true, y_pred) or a `Metric`")


def resolve(
    identifier: Any, y_true: Any, y_pred: Any, loss: Any = None
) -> Metric:
    """Returns the metric that `identifier` names, chosen, checked and built for labels and predictions.

    As in Keras, "accuracy" and "acc" are binary for predictions of one number, sparse where labels lack the axis of
    classes, and else categorical; "crossentropy" and "ce" likewise.

    Args:
      identifier: see `get`. A metric that a string names has that string as its name.
      y_true: labels: anything with `shape` and `dtype`, such as `jax.ShapeDtypeStruct`.
      y_pred: predictions, likewise.
      loss: the loss of this output: a crossentropy chosen by shapes has its `from_logits`.

    Raises:
      ValueError: for an unknown name, for a metric of values, such as `Mean`, and where shapes cannot work.
      TypeError: for anything that is no metric.

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
    with named_in_errors(metric.name):
        try:
            metric.validate(y_true, y_pred)
            metric.build(y_true, y_pred)
        except ValueError as error:
            advice = "" if "to_categorical" in str(error) else one_hot_advice(y_true, y_pred)
            raise ValueError(f"The metric {metric.name!r} cannot take these labels and predictions: {error}"
                             f"{advice and ' ' + advice}") from error
    _warn_of_logits(metric, loss)
    return metric


def _warn_of_logits(metric: Metric, loss: Any) -> None:
    if (isinstance(metric, BinaryAccuracy) and metric.threshold == 0.5 and getattr(loss, "from_logits", False)
            and isinstance(loss, (losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy))):
        warnings.warn(f"The metric {metric.name!r} takes predictions above 0.5 for yes, but the loss {loss.name!r} has "
                      "from_logits=True, and logits above 0 mean yes. Use "
                      f'`trainer.metrics.BinaryAccuracy("{metric.name}", threshold=0.0)`. {see("logits")}',
                      UserWarning, stacklevel=2)


def _check_takes_labels(metric: Metric) -> None:
    parameters = list(inspect.signature(metric.update_state).parameters)
    if parameters[1:2] == ["sample_weight"]:
        # It would take labels for the values, and predictions for their weights.
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
