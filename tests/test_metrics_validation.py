"""Metrics refuse arguments and shapes that cannot work, and say how to mend them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import metrics


def shapes(*arrays_or_shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in arrays_or_shapes]


@pytest.mark.parametrize(("make", "words"), [
    (lambda: metrics.Precision(thresholds=[-1, 0.5, 2]), r"Threshold values must be in \[0, 1\]. Received: \[-1, 2\]"),
    (lambda: metrics.AUC(thresholds=[1.5]), r"Threshold values must be in \[0, 1\]. Received: \[1.5\]"),
    (lambda: metrics.AUC(curve="Invalid"), 'Invalid AUC curve value: "Invalid".'),
    (lambda: metrics.AUC(summation_method="Invalid"), 'Invalid AUC summation method value: "Invalid".'),
    (lambda: metrics.AUC(num_thresholds=1), "Argument `num_thresholds` must be an integer > 1"),
    (lambda: metrics.AUC(num_labels=2), "`num_labels` is needed only when `multi_label` is True"),
    (lambda: metrics.SensitivityAtSpecificity(-1), r"`specificity` must be in the range \[0, 1\]."),
    (lambda: metrics.SpecificityAtSensitivity(2), r"`sensitivity` must be in the range \[0, 1\]."),
    (lambda: metrics.PrecisionAtRecall(2), r"`recall` must be in the range \[0, 1\]."),
    (lambda: metrics.RecallAtPrecision(2), r"`precision` must be in the range \[0, 1\]."),
    (lambda: metrics.RecallAtPrecision(0.5, num_thresholds=0), "`num_thresholds` must be an integer > 0"),
    (lambda: metrics.FBetaScore(average="mini"), "Invalid `average` argument value"),
    (lambda: metrics.FBetaScore(beta=1), "Invalid `beta` argument value"),
    (lambda: metrics.FBetaScore(beta=-0.5), "Invalid `beta` argument value"),
    (lambda: metrics.F1Score(threshold=1.5), "Invalid `threshold` argument value"),
    (lambda: metrics.R2Score(class_aggregation="mean"), "Invalid value for argument `class_aggregation`"),
    (lambda: metrics.R2Score(num_regressors=-1), "Invalid value for argument `num_regressors`"),
    (lambda: metrics.IoU(num_classes=2, target_class_ids=[0, 2]), r"Target class id 2 is out of range"),
    (lambda: metrics.Metric().update_state(1), "Metric must define `update_state`"),
    (lambda: metrics.Metric().result(), "Metric must define `result"),
    (lambda: metrics.Metric().add_variable((), "zeroes"), "Unknown initializer 'zeroes'. Did you mean 'zeros'"),
    (lambda: metrics.Metric().add_variable((), 0), "`initializer` must be a name or a function"),
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
    (metrics.AUC(), (8,), (8, 3), "must have the same shape"),
    (metrics.AUC(multi_label=True), (8,), (8,), "must have rank 2 when `multi_label=True`"),
    (metrics.FBetaScore(), (8,), (8,), "FBetaScore expects 2D inputs with shape"),
    (metrics.R2Score(), (8, 2, 2), (8, 2, 2), "R2Score expects 2D inputs with shape"),
])
def test_shapes_that_cannot_work_are_refused_before_and_in_updates(metric, true_shape, pred_shape, words):
    with pytest.raises(ValueError, match=words):
        metric.validate(*shapes(true_shape, pred_shape))
    with pytest.raises(ValueError, match=r"shape"):
        metric.update_state(np.zeros(true_shape, "int32"), np.zeros(pred_shape, "float32"))


def test_labels_and_predictions_of_other_sizes_are_refused_by_iou():
    with pytest.raises(ValueError, match=r"y_true.shape=\(4,\), y_pred.shape=\(4, 2\).*sparse_y_pred=False"):
        metrics.MeanIoU(num_classes=2).update_state(np.zeros(4, int), np.zeros((4, 2)))


def test_a_function_whose_values_have_no_rows_is_refused():
    metric = metrics.MeanMetricWrapper(lambda y_true, y_pred: jnp.mean(jnp.abs(y_true - y_pred), axis=0))
    with pytest.raises(ValueError, match=r"must return values of shape \(rows, ...\) with rows=\(4,\)"):
        metric.update_state(np.zeros((4, 2)), np.zeros((4, 2)))
