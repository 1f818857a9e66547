"""Metrics give Keras's numbers, on parts of the data as on the whole, eagerly and compiled."""

import json
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import losses, metrics
from trainer.metrics.registry import CLASSES

REFERENCE = json.loads((pathlib.Path(__file__).parent / "reference" / "metrics.json").read_text())
CASES = [pytest.param(case, id="-".join([case["name"], case["data"], *map(str, case["arguments"].values())]))
         for case in REFERENCE["cases"]]


def arrays(nested):
    array = np.asarray(nested)
    return array.astype("float32" if array.dtype.kind == "f" else "int32")


def batches_of(case):
    return [tuple(map(arrays, batch)) for batch in case["batches"]]


def metric_of(case):
    return getattr(metrics, case["name"])(**case["arguments"])


def shapes(*arrays_or_shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in arrays_or_shapes]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_keras(case):
    metric = metric_of(case)
    for batch in batches_of(case):
        metric.update_state(*batch)
    np.testing.assert_allclose(metric.result(), case["result"], rtol=2e-5, atol=2e-6)

    metric.reset_state()
    for batch, weight in zip(batches_of(case), case["weights"], strict=True):
        metric.update_state(*batch, sample_weight=weight)
    np.testing.assert_allclose(metric.result(), case["weighted_result"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_compiled_accumulators_of_parts_merge_to_those_of_the_whole(case):
    metric = metric_of(case)
    batch, weights = batches_of(case)[0], arrays(case["weights"][0])
    metric.build(batch[0], batch[-1])
    zeros = metric.stateless_reset_state()

    @jax.jit
    def updated_with_result(variables, part, weight):
        variables = metric.stateless_update_state(variables, *part, sample_weight=weight)
        return variables, metric.stateless_result(variables)

    updates = [updated_with_result(zeros, [values[rows] for values in batch], weights[rows])
               for rows in (slice(0, 3), slice(3, 6))]
    merged = metric.merge_variables(*(variables for variables, result in updates))
    whole = metric.stateless_update_state(zeros, *batch, sample_weight=weights)
    for one, other in zip(merged, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    for variables, result in updates:
        np.testing.assert_allclose(result, metric.stateless_result(variables), rtol=2e-5, atol=2e-6)
    assert metric.additive
    assert all(variable.value.dtype == jnp.float32 and not variable.numpy().any() for variable in metric.variables)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_weight_zero_are_as_if_absent(case):
    metric, without = metric_of(case), metric_of(case)
    batch = batches_of(case)[0]
    metric.update_state(*batch, sample_weight=np.array([1, 1, 1, 0, 0, 0], "float32"))
    without.update_state(*(values[:3] for values in batch), sample_weight=np.ones(3, "float32"))
    for one, other in zip(metric.variables, without.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_all_zero_give_a_number(case):
    metric = metric_of(case)
    batch = batches_of(case)[0]
    assert np.all(np.isfinite(metric(*batch, sample_weight=np.zeros(6, "float32"))))


@pytest.mark.parametrize("case", CASES)
def test_a_config_makes_an_equal_metric(case):
    metric = metric_of(case)
    config = metric.get_config()
    copy = type(metric).from_config(config)
    assert copy.get_config() == config
    assert config["name"] == metric.name
    batch = batches_of(case)[0]
    np.testing.assert_array_equal(copy(*batch), metric(*batch))


def test_every_class_has_reference_numbers_and_is_public():
    assert {cls.__name__ for cls in CLASSES} == {case["name"] for case in REFERENCE["cases"]}
    assert {cls.__name__ for cls in CLASSES} <= set(metrics.__all__)


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
    (None, TypeError, "type NoneType"),
    (int, TypeError, "type type"),
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


def test_resolve_gives_a_crossentropy_the_logits_of_the_loss_and_leaves_accuracy_at_one_half():
    y_true, y_pred = shapes((8, 1), (8, 1))
    loss = losses.BinaryCrossentropy(from_logits=True)
    assert metrics.resolve("ce", y_true, y_pred, loss).from_logits
    assert not metrics.resolve("ce", y_true, y_pred, losses.BinaryCrossentropy()).from_logits
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
               FalseNegatives"""),
    (None, "Mean Sum"),
])
def test_directions(direction, names):
    assert {cls.__name__ for cls in CLASSES if cls.direction == direction} == set(names.split())


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
    assert metrics.MeanIoU(num_classes=3).target_class_ids == [0, 1, 2]


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


def test_a_function_that_returns_a_mean_over_rows_leaves_out_rows_of_weight_zero():
    metric = metrics.MeanMetricWrapper(lambda y_true, y_pred: jnp.mean(jnp.abs(y_true - y_pred)))
    assert float(metric(np.zeros((3, 1)), np.array([[1.0], [2.0], [9.0]]), sample_weight=[1, 1, 0])) == 1.5


def test_a_class_to_ignore_does_not_count_with_or_without_weights():
    y_true, y_pred = np.array([[0, -1, 1]]), np.array([[[0.5, 0.5], [0.9, 0.1], [0.75, 0.25]]])
    expected = (np.log(2) + np.log(4)) / 2
    for weight in (None, np.ones(1), np.ones((1, 3))):
        metric = metrics.SparseCategoricalCrossentropy(ignore_class=-1)
        np.testing.assert_allclose(metric(y_true, y_pred, sample_weight=weight), expected, rtol=1e-5)


def test_a_scalar_weight_counts_for_each_row():
    metric = metrics.Mean()
    metric.update_state([1.0, 2.0, 3.0], sample_weight=2.0)
    metric.update_state([10.0], sample_weight=2.0)
    assert float(metric.result()) == 4.0


def test_fractional_weights_count_in_an_intersection_over_union_of_integers():
    metric = metrics.MeanIoU(num_classes=2, dtype="float32")
    metric.update_state([0, 1], [0, 0], sample_weight=[0.25, 0.75])
    np.testing.assert_allclose(metric.result(), 0.125)


@pytest.mark.parametrize("metric", [metrics.Mean(dtype="bfloat16"), metrics.Sum(dtype="float16")])
def test_a_narrow_dtype_is_that_of_the_result_and_not_of_the_accumulators(metric):
    for _ in range(3):
        metric.update_state(np.full(1000, 1.0, metric.dtype))
    assert metric.total.value.dtype == jnp.float32
    assert float(metric.total) == 3000.0
    assert metric.result().dtype == metric.dtype


def test_an_area_with_scores_outside_of_zero_and_one_counts_every_row():
    metric = metrics.AUC()
    metric.update_state([0, 1, 1], [-2.0, 0.5, 3.0])
    totals = sum(variable.numpy() for variable in metric.variables)
    assert totals.tolist() == [3.0] * 200


class KerasStyle(metrics.Metric):
    def __init__(self, name="keras_style", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")
        self.errors = [metrics.MeanAbsoluteError()]

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = jnp.abs(y_true - y_pred)
        if sample_weight is not None:
            values = jnp.multiply(values, sample_weight)
        self.total.assign(self.total + jnp.sum(values))
        self.count.assign_add(len(values))
        self.errors[0].update_state(y_true, y_pred, sample_weight)

    def result(self):
        return {"mean": jnp.divide(self.total, self.count), "total": self.total, "mae": self.errors[0].result()}


def test_a_subclass_written_for_keras_works_eagerly_and_compiled():
    metric = KerasStyle()
    assert len(metric.variables) == 4
    y_true, y_pred = np.zeros(4, "float32"), np.arange(4, dtype="float32")
    expected = {"mean": 1.5, "total": 6.0, "mae": 1.5}
    assert {key: float(value) for key, value in metric(y_true, y_pred).items()} == expected

    variables = jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), y_true, y_pred)
    result = jax.jit(metric.stateless_result)(variables)
    assert {key: float(value) for key, value in result.items()} == expected
    assert float(metric.total) == 6.0
    metric.reset_state()
    assert [float(variable) for variable in metric.variables] == [0.0] * 4


def test_a_variable_before_super_init_is_refused():
    class Early(metrics.Metric):
        def __init__(self):
            self.add_variable()

    with pytest.raises(RuntimeError, match=r"Call `super\(\).__init__\(\)` first in the `__init__` of Early"):
        Early()


def test_an_update_that_raises_leaves_values_as_they_were():
    class Failing(metrics.Mean):
        def update_state(self, values, sample_weight=None):
            super().update_state(values, sample_weight)
            raise RuntimeError("after the update")

    metric = Failing()
    with pytest.raises(RuntimeError, match="after the update"):
        jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), np.ones(3))
    assert [float(variable) for variable in metric.variables] == [0.0, 0.0]


def test_a_pure_update_is_not_seen_by_another_thread():
    inside, looked = threading.Event(), threading.Event()
    seen = []

    class Waiting(metrics.Mean):
        def update_state(self, values, sample_weight=None):
            super().update_state(values, sample_weight)
            inside.set()
            looked.wait(10)

    metric = Waiting()
    zeros = metric.stateless_reset_state()
    thread = threading.Thread(target=lambda: seen.extend(metric.stateless_update_state(zeros, np.ones(3))))
    thread.start()
    assert inside.wait(10)
    assert float(metric.total) == 0.0
    looked.set()
    thread.join()
    assert [float(value) for value in seen] == [3.0, 3.0]


def test_variables_made_in_a_trace_outlive_it():
    metric = metrics.FBetaScore()
    jax.jit(lambda: metric.stateless_update_state([], jnp.eye(3), jnp.eye(3)))()
    assert [variable.shape for variable in metric.variables] == [(3,)] * 4
    np.testing.assert_array_equal(metric(np.eye(3), np.eye(3)), np.ones(3))


def test_variables_take_part_in_arithmetic():
    variable = metrics.Variable((2,), "ones", name="v")
    np.testing.assert_array_equal(variable.assign_sub([0.0, 3.0]), [1.0, -2.0])
    for received, expected in [
        (variable + variable, [2, -4]),
        (1 - variable, [0, 3]),
        (np.array([2.0, 2.0]) * variable, [2, -4]),
        (-variable, [-1, 2]),
        (abs(variable), [1, 2]),
        (variable[1], -2),
        (variable == 1, [True, False]),
        (variable >= 0, [True, False]),
        (jnp.square(variable), [1, 4]),
        (jnp.where(variable > 0, variable, 0), [1, 0]),
        (jnp.zeros_like(variable), [0, 0]),
        (jnp.zeros(variable.shape, variable.dtype), [0, 0]),
        (jax.jit(jnp.sum)(variable), -1),
        (np.asarray(variable), [1, -2]),
        (variable.numpy(), [1, -2]),
    ]:
        np.testing.assert_array_equal(received, expected)
    assert len(variable) == 2
    assert (variable.shape, variable.ndim, variable.dtype, variable.name) == ((2,), 1, "float32", "v")
