"""Finds a metric by its name, as `compile(metrics=[...])` takes it."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from trainer.core.errors import unknown_name, wrong_type
from trainer.losses import Loss, as_loss
from trainer.losses.base import FunctionLoss
from trainer.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from trainer.metrics.auc import AUC
from trainer.metrics.base import Metric, snake_case
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
from trainer.metrics.hinge import CategoricalHinge, Hinge, SquaredHinge
from trainer.metrics.iou import BinaryIoU, IoU, MeanIoU, OneHotIoU, OneHotMeanIoU
from trainer.metrics.operating_point import (
    PrecisionAtRecall,
    RecallAtPrecision,
    SensitivityAtSpecificity,
    SpecificityAtSensitivity,
)
from trainer.metrics.probabilistic import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    KLDivergence,
    Poisson,
    SparseCategoricalCrossentropy,
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

# The names that stand for a binary, a categorical and a sparse metric: the shapes decide which.
_ACCURACIES = (BinaryAccuracy, CategoricalAccuracy, SparseCategoricalAccuracy)
_CROSSENTROPIES = (BinaryCrossentropy, CategoricalCrossentropy, SparseCategoricalCrossentropy)
_BY_SHAPES: dict[str, tuple[type[Metric], type[Metric], type[Metric]]] = {
    "accuracy": _ACCURACIES,
    "acc": _ACCURACIES,
    "crossentropy": _CROSSENTROPIES,
    "ce": _CROSSENTROPIES,
}


def get(identifier: Any) -> Metric:
    """Returns the metric that `identifier` names.

    Args:
      identifier: the name of a metric ("mse", "mean_squared_error", "MeanSquaredError"), a `Metric`, which is
        returned as it is, a class of metrics without further arguments, a loss, or a function of `(y_true, y_pred)`,
        which becomes the mean of its values under the function's name.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is no metric.

    >>> get("mse").name
    'mean_squared_error'
    """
    if isinstance(identifier, str):
        if identifier not in _BY_NAME:
            raise _unknown(identifier)
        identifier = _BY_NAME[identifier]
    check(identifier)
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


def check(identifier: Any) -> None:
    """Raises what `resolve` raises for an unknown name, or for anything that is no metric, before shapes are known.

    >>> check("accuracy")
    """
    if isinstance(identifier, str):
        if identifier not in _BY_NAME and identifier.lower() not in _BY_SHAPES:
            raise _unknown(identifier)
    elif isinstance(identifier, type):
        if not issubclass(identifier, Metric):
            raise _not_a_metric(identifier)
    elif not isinstance(identifier, (Metric, Loss)) and not callable(identifier):
        raise _not_a_metric(identifier)


def _unknown(name: str) -> ValueError:
    return unknown_name("metric", name, [*_BY_NAME, *_BY_SHAPES])


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
        metric = get(identifier)
    _check_takes_labels(metric)
    if isinstance(identifier, str):
        metric.name = identifier
    metric.validate(y_true, y_pred)
    metric.build(y_true, y_pred)
    return metric


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
