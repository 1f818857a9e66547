"""Metrics refuse arguments and shapes that cannot work, and say how to mend them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import metrics


def test_integers_beyond_32_bits_keep_their_values():
    large = np.array([2**40, 2**32])  # the latter is 0 in 32 bits
    mean, error, accuracy = metrics.Mean(), metrics.MeanAbsoluteError(), metrics.Accuracy()
    mean.update_state(large)
    error.update_state(large, np.zeros(2, np.float32))
    accuracy.update_state(large, np.array([2**40, 0]))
    assert [float(metric.result()) for metric in (mean, error, accuracy)] == [large.mean(), large.mean(), 0.5]
    assert metrics.binary_accuracy(large[1:, None], np.zeros((1, 1), np.float32)).tolist() == [[0.0]]


def shapes(*arrays_or_shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in arrays_or_shapes]


@pytest.mark.parametrize(("make", "words"), [
    (lambda: metrics.Precision(thresholds=[-1, 0.5, 2]), r"Threshold values must be in \[0, 1\]. Received: \[-1, 2\]"),
    (lambda: metrics.AUC(thresholds=[1.5]), r"Threshold values must be in \[0, 1\]. Received: \[1.5\]"),
    (lambda: metrics.Precision(thresholds="0.5"), r"`thresholds` must be a number or several, .* Received: str"),
    (lambda: metrics.Recall(thresholds=[0.5, None]), r"Threshold values must be in \[0, 1\]. Received: \[None\]"),
    (lambda: metrics.AUC(thresholds=["0.5"]), r"`thresholds` must be a number or several, .* Received: str"),
    (lambda: metrics.Precision(top_k=0), "`top_k` must be a whole number of at least 1. Received: top_k=0"),
    (lambda: metrics.Recall(top_k=2.0), "`top_k` must be a whole number of at least 1. Received: .* type float"),
    (lambda: metrics.TopKCategoricalAccuracy(k=0), "`k` must be a whole number of at least 1. Received: k=0"),
    (lambda: metrics.SparseTopKCategoricalAccuracy(k=-1), "`k` must be a whole number of at least 1. Received: k=-1"),
    (lambda: metrics.ExpectedCalibrationError(num_bins=0), "`num_bins` must be a whole number of at least 1"),
    (lambda: metrics.ExpectedCalibrationError(num_bins=1.5), "`num_bins` must be a whole number .* type float"),
    (lambda: metrics.ExpectedCalibrationError(from_logits="no"), "`from_logits` must be True or False"),
    (lambda: metrics.BinaryCrossentropy(from_logits="no"), "`from_logits` must be True or False"),
    (lambda: metrics.AUC(curve="Invalid"), 'Invalid AUC curve value: "Invalid".'),
    (lambda: metrics.AUC(summation_method="Invalid"), 'Invalid AUC summation method value: "Invalid".'),
    (lambda: metrics.AUC(num_thresholds=1), "Argument `num_thresholds` must be an integer > 1"),
    (lambda: metrics.AUC(num_labels=2), "`num_labels` is needed only when `multi_label` is True"),
    (lambda: metrics.SensitivityAtSpecificity(-1), r"`specificity` must be in the range \[0, 1\]."),
    (lambda: metrics.SpecificityAtSensitivity(2), r"`sensitivity` must be in the range \[0, 1\]."),
    (lambda: metrics.PrecisionAtRecall(2), r"`recall` must be in the range \[0, 1\]."),
    (lambda: metrics.RecallAtPrecision(2), r"`precision` must be in the range \[0, 1\]."),
    (lambda: metrics.RecallAtPrecision(0.5, num_thresholds=0), "`num_thresholds` must be an integer > 0"),
    (lambda: metrics.FBetaScore(average="mini"), "Invalid `average` argument value. Expected one of: "
     r"\{None, 'micro', 'macro', 'weighted'\}. Received: average=mini"),
    (lambda: metrics.FBetaScore(beta="1.0"), "Invalid `beta` argument value. It should be a Python float. .*str"),
    (lambda: metrics.FBetaScore(beta=None), "Invalid `beta` argument value. It should be a Python float. .*NoneType"),
    (lambda: metrics.F1Score(threshold="0.5"), "Invalid `threshold` argument value. .*float. .*str"),
    (lambda: metrics.FBetaScore(beta=-0.5), "Invalid `beta` argument value. It should be > 0. Received: beta=-0.5"),
    (lambda: metrics.F1Score(threshold=1.5), "Invalid `threshold` argument value. It should verify 0 < thresh"),
    (lambda: metrics.R2Score(class_aggregation="mean"), "Invalid value for argument `class_aggregation`"),
    (lambda: metrics.R2Score(num_regressors=-1), "Invalid value for argument `num_regressors`"),
    (lambda: metrics.IoU(num_classes=2, target_class_ids=[3, 0, 2, 5]),
     r"Target class id 5 is out of range, which is \[0, 2\)."),
    (lambda: metrics.OneHotIoU(num_classes=2, target_class_ids=[]), "`target_class_ids` must be at least one class"),
    (lambda: metrics.MeanIoU(num_classes=2.0), "`num_classes` must be a whole number"),
    (lambda: metrics.BinaryIoU(threshold="0.5"), "`threshold` must be a number"),
    (lambda: metrics.Metric().update_state(1), "Metric must define `update_state`"),
    (lambda: metrics.Metric().result(), "Metric must define `result"),
    (lambda: metrics.Metric().add_variable((), "zeroes"), "Unknown initializer 'zeroes'. Did you mean 'zeros'"),
    (lambda: metrics.Metric().add_variable((), 0), "`initializer` must be a name, a function of"),
    (lambda: metrics.Mean().total.assign([1, 2]), r"'total' has shape \(\). Received: a value of shape \(2,\)"),
    (lambda: metrics.Mean().stateless_result([0.0]), "corresponding 1:1 .* length 1, but expected 2 variables"),
    (lambda: metrics.Mean().stateless_update_state([], 1.0), "corresponding 1:1 .* length 0, but expected 2 variables"),
])
def test_wrong_arguments_are_refused(make, words):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        make()


@pytest.mark.parametrize(("metric", "true_shape", "pred_shape", "words"), [
    (metrics.MeanSquaredError(), (8, 1), (8, 3), "must have the same shape"),
    (metrics.RootMeanSquaredError(), (8, 2), (8, 3), "must have the same shape"),
    (metrics.CosineSimilarity(), (8, 2), (8, 3), "must have the same shape"),
    (metrics.PearsonCorrelation(), (8, 2), (8, 3), "must have the same shape"),
    (metrics.Accuracy(), (8, 2), (8, 3), "must have the same shape"),
    (metrics.BinaryAccuracy(), (8,), (8, 3), "must have the same shape"),
    (metrics.CategoricalAccuracy(), (8,), (8, 3), "use the metric's sparse form"),
    (metrics.CategoricalAccuracy(), (8,), (8,), r"must have shape \(batch, ..., classes\)"),
    (metrics.TopKCategoricalAccuracy(), (8, 4), (8, 3), "must have the same shape"),
    (metrics.SparseCategoricalAccuracy(), (8, 3), (8, 3), "The labels are one-hot"),
    (metrics.SparseCategoricalAccuracy(), (), (), r"must have shape \(batch, ..., classes\)"),
    (metrics.SparseTopKCategoricalAccuracy(), (7,), (8, 3), "must hold class indices"),
    (metrics.CategoricalCrossentropy(), (8,), (8, 3), "use SparseCategoricalCrossentropy"),
    (metrics.SparseCategoricalCrossentropy(), (8, 3), (8, 3), "The labels are one-hot"),
    (metrics.Precision(), (8,), (8, 3), "must have the same shape"),
    (metrics.Recall(class_id=1), (8,), (8,), "When class_id is provided, y_pred must be a 2D array with shape"),
    (metrics.Recall(class_id=3), (8, 3), (8, 3), r"`class_id` must be .* in \[-3, 3\). Received: class_id=3, y_pred"),
    (metrics.Precision(class_id=-4), (8, 3), (8, 3, 1), r"`class_id` must be .* in \[-3, 3\). Received: class_id=-4"),
    (metrics.PrecisionAtRecall(0.5, class_id=3), (8, 3), (8, 3), "`class_id` must be a class of the predictions"),
    (metrics.Precision(top_k=4), (8, 3), (8, 3), "`top_k` must be at most .* classes, 3. Received: top_k=4"),
    (metrics.Precision(top_k=2), (), (), r"`top_k` must be at most the number of classes, 1. .* y_pred.shape=\(\)"),
    (metrics.AUC(), (8,), (8, 3), "must have the same shape"),
    (metrics.AUC(label_weights=[1, 2]), (8, 3), (8, 3), r"one weight for each of 3 labels. Received: .* shape \(2,\)"),
    (metrics.AUC(label_weights=np.ones(8)), (8,), (8,), r"one weight for each of 1 labels. Received: .* shape \(8,\)"),
    (metrics.AUC(multi_label=True, label_weights=[1, 2]), (8, 3), (8, 3), "one weight for each of 3 labels"),
    (metrics.AUC(multi_label=True, num_labels=2), (8, 3), (8, 3),
     "`num_labels` must be the number of labels, 3. Received: num_labels=2.* Leave it out"),
    (metrics.AUC(multi_label=True), (8,), (8,), "must have rank 2 when `multi_label=True`"),
    (metrics.ExpectedCalibrationError(), (8, 4), (8, 3), "must hold class indices"),
    (metrics.ExpectedCalibrationError(), (7,), (8, 1), "must have the same shape"),
    (metrics.FBetaScore(), (8,), (8,), "FBetaScore expects 2D inputs with shape"),
    (metrics.R2Score(), (8, 2, 2), (8, 2, 2), "R2Score expects 2D inputs with shape"),
    (metrics.MeanIoU(num_classes=2), (4,), (4, 2), r"y_true.shape=\(4,\), y_pred.shape=\(4, 2\).*sparse_y_pred=False"),
    (metrics.MeanIoU(num_classes=2, sparse_y_pred=False), (8,), (8, 4),
     r"`y_pred` must hold scores of num_classes=2 .* axis -1. Received: y_pred.shape=\(8, 4\). Give `num_classes=4`"),
    (metrics.OneHotIoU(num_classes=3, target_class_ids=[0], axis=1), (8, 4, 3), (8, 4, 3),
     r"`y_true` must hold scores of num_classes=3 classes on axis 1. Received: y_true.shape=\(8, 4, 3\)"),
])
def test_shapes_that_cannot_work_are_refused_before_and_in_updates(metric, true_shape, pred_shape, words):
    with pytest.raises(ValueError, match=words):
        metric.validate(*shapes(true_shape, pred_shape))
    with pytest.raises(ValueError, match=r"shape"):
        metric.update_state(np.zeros(true_shape, "int32"), np.zeros(pred_shape, "float32"))


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "true_shape", "pred_shape"), [
    (metrics.Precision(class_id=-3, top_k=3), (8, 3), (8, 3)),
    (metrics.Recall(class_id=2, top_k=1), (8, 3), (8, 3, 1)),
    (metrics.Precision(top_k=2), (8,), (8,)),
    (metrics.Precision(thresholds=np.float32(0.5)), (), ()),
    (metrics.AUC(thresholds=0.5, label_weights=[2.0]), (8,), (8,)),
    (metrics.AUC(multi_label=True, num_labels=1, label_weights=(2.0,)), (8,), (8, 1)),
    (metrics.MeanIoU(num_classes=3, sparse_y_pred=False, axis=1), (8, 5), (8, 3, 5)),
    (metrics.MeanIoU(num_classes=3), (8, 1), (8,)),
])
def test_the_outermost_arguments_that_fit_the_shapes_are_accepted(metric, true_shape, pred_shape):
    metric.validate(*shapes(true_shape, pred_shape))
    metric.update_state(np.zeros(true_shape, "int32"), np.zeros(pred_shape, "float32"))
    assert np.isfinite(metric.result())


def test_a_function_whose_values_have_no_rows_is_refused():
    metric = metrics.MeanMetricWrapper(lambda y_true, y_pred: jnp.mean(jnp.abs(y_true - y_pred), axis=0))
    with pytest.raises(ValueError, match=r"must return values of shape \(rows, ...\) with rows=\(4,\)"):
        metric.update_state(np.zeros((4, 2)), np.zeros((4, 2)))


def absolute_error(y_true, y_pred):
    return jnp.mean(jnp.abs(y_true - y_pred), axis=-1)


def mean_absolute_error(y_true, y_pred):
    return jnp.mean(jnp.abs(y_true - y_pred))


@pytest.mark.parametrize("function", [absolute_error, mean_absolute_error])
@pytest.mark.parametrize(("true_shape", "pred_shape"), [((4,), (4, 1)), ((4, 1), (4,)), ((4, 1), (4, 1))])
def test_labels_and_outputs_of_a_function_do_not_broadcast_over_rows(function, true_shape, pred_shape):
    y_true, y_pred = np.arange(4.0).reshape(true_shape), np.array([0.0, 2.0, 4.0, 9.0]).reshape(pred_shape)
    metric = metrics.get(function)
    assert float(metric(y_true, y_pred)) == 9 / 4
    assert type(metric).from_config(metric.get_config()).fn(y_true, y_pred).shape in ((), (4,))
    assert metric.get_config()["fn"] is function


@pytest.mark.slow
@pytest.mark.parametrize("loss", [absolute_error, mean_absolute_error])
def test_a_function_has_one_value_as_a_loss_and_as_a_metric_in_fit(loss):
    model = trainer.Sequential([nn.Dense(1)])
    model.compile("sgd", loss, metrics=[loss])
    x, y = np.random.default_rng(0).normal(0, 9, (10, 3)).astype(np.float32), np.arange(10).astype(np.uint8)
    history = model.fit(x, y, batch_size=4, verbose=0).history
    np.testing.assert_allclose(history["loss"], history[loss.__name__], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8"])
def test_integers_do_not_wrap_around_in_a_function(dtype):
    metric = metrics.MeanMetricWrapper(lambda y_true, y_pred, factor: y_true * 100 - factor * y_pred, factor=2)
    assert float(metric(np.array([[1], [2]], dtype), np.array([[100], [100]], dtype))) == -50


def test_scores_of_one_class_keep_their_axis():
    metric = metrics.SparseTopKCategoricalAccuracy(k=1, from_sorted_ids=True)
    assert float(metric(np.array([[0, 1], [1, 1]], "uint8"), np.array([[[0], [0]], [[1], [1]]], "int32"))) == 0.75
