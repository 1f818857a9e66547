"""Metrics are found by name, chosen by shapes, and have Keras's names and attributes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import losses, metrics
from trainer.metrics import registry
from trainer.metrics.registry import CLASSES


def shapes(*arrays_or_shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in arrays_or_shapes]


@pytest.mark.parametrize(("identifier", "kind", "name"), [
    ("mse", metrics.MeanSquaredError, "mean_squared_error"),
    ("MAE", metrics.MeanAbsoluteError, "mean_absolute_error"),
    ("mape", metrics.MeanAbsolutePercentageError, "mean_absolute_percentage_error"),
    ("msle", metrics.MeanSquaredLogarithmicError, "mean_squared_logarithmic_error"),
    ("bce", metrics.BinaryCrossentropy, "binary_crossentropy"),
    ("AUC", metrics.AUC, "auc"),
    ("auc", metrics.AUC, "auc"),
    ("kl_divergence", metrics.KLDivergence, "kl_divergence"),
    ("log_cosh_error", metrics.LogCoshError, "logcosh"),
    ("f_beta_score", metrics.FBetaScore, "fbeta_score"),
    ("accuracy", metrics.Accuracy, "accuracy"),
    (metrics.Precision, metrics.Precision, "precision"),
    (losses.huber, metrics.LossMetric, "huber"),
    (losses.Huber(), metrics.LossMetric, "huber_loss"),
])
def test_get_finds_a_metric(identifier, kind, name):
    metric = metrics.get(identifier)
    assert type(metric) is kind
    assert metric.name == name


def test_get_returns_a_metric_as_it_is():
    metric = metrics.Mean(name="mine")
    assert metrics.get(metric) is metric


def test_get_makes_the_mean_of_a_function():
    def error_of_sign(y_true, y_pred):
        return jnp.sign(y_true) != jnp.sign(y_pred)

    metric = metrics.get(error_of_sign)
    assert metric.name == "error_of_sign"
    assert metric.direction is None
    assert float(metric(np.array([[1.0], [-1.0]]), np.array([[2.0], [3.0]]))) == 0.5


@pytest.mark.parametrize(("identifier", "error", "words"), [
    ("acuracy", ValueError, "Unknown metric 'acuracy'. Did you mean 'accuracy'"),
    ("mean_squared_eror", ValueError, "'mean_squared_error'"),
    (3, TypeError, "`metrics` must be the name of a metric.* type int"),
    (int, TypeError, "Received: the class int"),
])
def test_get_refuses_what_is_no_metric(identifier, error, words):
    with pytest.raises(error, match=words):
        metrics.get(identifier)


@pytest.mark.parametrize(("true_shape", "pred_shape", "prefix"), [
    ((8, 1), (8, 1), "Binary"),
    ((8,), (8, 1), "Binary"),
    ((8,), (8,), "Binary"),
    ((8,), (8, 3), "SparseCategorical"),
    ((8, 1), (8, 3), "SparseCategorical"),
    ((8, 5), (8, 5, 3), "SparseCategorical"),
    ((8, 3), (8, 3), "Categorical"),
])
@pytest.mark.parametrize(("name", "suffix"), [
    ("accuracy", "Accuracy"), ("acc", "Accuracy"), ("crossentropy", "Crossentropy"), ("ce", "Crossentropy")])
def test_resolve_chooses_by_shapes(name, suffix, true_shape, pred_shape, prefix):
    y_true, y_pred = jax.ShapeDtypeStruct(true_shape, "int32"), jax.ShapeDtypeStruct(pred_shape, "float32")
    metric = metrics.resolve(name, y_true, y_pred)
    assert type(metric).__name__ == prefix + suffix
    assert metric.name == name


def test_resolve_keeps_names():
    y_true, y_pred = shapes((8, 3), (8, 3))
    assert metrics.resolve("mse", y_true, y_pred).name == "mse"
    assert metrics.resolve(metrics.AUC(name="area"), y_true, y_pred).name == "area"


class MeanWithItsOwnUpdate(metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(jnp.abs(y_true - y_pred), sample_weight)


class MeanOfAnything(metrics.Mean):
    def update_state(self, *args, **kwargs):
        super().update_state(args[1])


class MeanOfSquares(metrics.Mean):
    def update_state(self, values, sample_weight=None):
        super().update_state(values**2, sample_weight)


@pytest.mark.parametrize(("identifier", "name"), [
    ("mean", "mean"), ("sum", "sum"), (metrics.Mean(name="mine"), "mine"), (metrics.Sum, "sum"),
    (MeanOfSquares(), "mean")])
def test_resolve_refuses_a_metric_that_would_take_predictions_for_weights(identifier, name):
    message = rf"The metric {name!r} accumulates values.* update_state\(values, sample_weight\). Give a function of"
    with pytest.raises(ValueError, match=message):
        metrics.resolve(identifier, *shapes((8, 3), (8, 3)))


@pytest.mark.parametrize("metric", [MeanWithItsOwnUpdate(), MeanOfAnything()])
def test_resolve_takes_a_mean_with_an_update_of_labels_and_predictions(metric):
    assert metrics.resolve(metric, *shapes((8, 3), (8, 3))) is metric


def test_resolve_gives_a_crossentropy_the_logits_of_the_loss_and_leaves_accuracy_at_one_half():
    y_true, y_pred = shapes((8, 1), (8, 1))
    loss = losses.BinaryCrossentropy(from_logits=True)
    assert metrics.resolve("ce", y_true, y_pred, loss).from_logits
    assert not metrics.resolve("ce", y_true, y_pred, losses.BinaryCrossentropy()).from_logits
    with pytest.warns(UserWarning, match="logits above 0 mean yes"):
        assert metrics.resolve("acc", y_true, y_pred, loss).threshold == 0.5


@pytest.mark.parametrize(("metric", "count"), [
    (metrics.FBetaScore(), 4), (metrics.AUC(multi_label=True), 4), (metrics.R2Score(), 5)])
def test_resolve_makes_the_variables_that_depend_on_shapes(metric, count):
    y_true, y_pred = shapes((8, 3), (8, 3))
    assert metrics.resolve(metric, y_true, y_pred) is metric
    assert len(metric.stateless_reset_state()) == count
    metric.build(y_true, y_pred)
    assert len(metric.variables) == count


@pytest.mark.parametrize(("metric", "names"), [
    (metrics.Mean(), ["total", "count"]),
    (metrics.Sum(), ["total"]),
    (metrics.MeanSquaredError(), ["total", "count"]),
    (metrics.Precision(), ["true_positives", "false_positives"]),
    (metrics.Recall(), ["true_positives", "false_negatives"]),
    (metrics.AUC(), ["true_positives", "false_positives", "true_negatives", "false_negatives"]),
    (metrics.MeanIoU(num_classes=2), ["total_confusion_matrix"]),
])
def test_variables_have_the_names_of_keras(metric, names):
    assert [variable.name for variable in metric.variables] == names


@pytest.mark.parametrize(("direction", "names"), [
    ("max", """Accuracy BinaryAccuracy CategoricalAccuracy SparseCategoricalAccuracy TopKCategoricalAccuracy
               SparseTopKCategoricalAccuracy CosineSimilarity R2Score PearsonCorrelation ConcordanceCorrelation
               TruePositives TrueNegatives Precision Recall SensitivityAtSpecificity SpecificityAtSensitivity
               PrecisionAtRecall RecallAtPrecision AUC FBetaScore F1Score IoU BinaryIoU MeanIoU OneHotIoU
               OneHotMeanIoU"""),
    ("min", """BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy KLDivergence Poisson
               MeanSquaredError RootMeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError
               MeanSquaredLogarithmicError LogCoshError Hinge SquaredHinge CategoricalHinge FalsePositives
               FalseNegatives ExpectedCalibrationError"""),
    (None, "Mean Sum"),
])
def test_directions(direction, names):
    found = {cls.__name__ for cls in CLASSES if cls.direction == direction}
    assert found == set(names.split()), "say by `direction` which result is better, and list the metric here"


def test_attributes_of_keras():
    metric = metrics.Precision(thresholds=[0.2, 0.8], top_k=3, class_id=1)
    assert (metric.thresholds, metric.top_k, metric.class_id) == ([0.2, 0.8], 3, 1)
    area = metrics.AUC(thresholds=[0.8, 0.3], curve="PR", summation_method="majoring", from_logits=True)
    assert area.num_thresholds == 4
    assert area.thresholds[1:-1] == [0.3, 0.8]
    assert area.curve == metrics.AUCCurve.PR
    assert area.summation_method == metrics.AUCSummationMethod.MAJORING
    assert area._from_logits
    assert metrics.RecallAtPrecision(0.7).precision == 0.7
    assert metrics.TopKCategoricalAccuracy(k=3).k == 3
    assert metrics.PearsonCorrelation(axis=0).axis == metrics.ConcordanceCorrelation(axis=0).axis == 0
    assert metrics.MeanIoU(num_classes=3).target_class_ids == [0, 1, 2]


@pytest.mark.parametrize("loss", [losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy])
def test_a_binary_accuracy_of_logits_is_warned_of(loss):
    labels, logits = (jax.ShapeDtypeStruct((8, 1), "float32"),) * 2
    for identifier in ("accuracy", "acc", "binary_accuracy", metrics.BinaryAccuracy()):
        with pytest.warns(UserWarning, match=r"BinaryAccuracy\(threshold=0.0"):
            registry.resolve(identifier, labels, logits, loss(from_logits=True))
        registry.resolve(identifier, labels, logits, loss())
    registry.resolve(metrics.BinaryAccuracy(threshold=0.0), labels, logits, loss(from_logits=True))


@pytest.mark.parametrize(("name", "labels"), [("precision", (8,)), ("precision", (8, 1)), ("f1_score", (8,))])
def test_an_error_of_shapes_names_the_metric_and_what_to_do_about_class_indices(name, labels):
    shapes = jax.ShapeDtypeStruct(labels, "int32"), jax.ShapeDtypeStruct((8, 3), "float32")
    with pytest.raises(ValueError, match=rf"The metric '{name}' .*`trainer.utils.to_categorical\(y, 3\)`") as raised:
        registry.resolve(name, *shapes)
    assert "Add the axis of outputs" not in str(raised.value)
