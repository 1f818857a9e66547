"""Metrics give Keras's numbers, on parts of the data as on the whole, eagerly and compiled."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer import metrics
from trainer.metrics import arrays as metric_arrays
from trainer.metrics.registry import CLASSES

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "metrics.json").read_text())
CASES = [pytest.param(case, id="-".join([case["name"], case["data"], *map(str, case["arguments"].values())]))
         for case in REFERENCE["cases"]]


def arrays(nested):
    array = np.asarray(nested)
    return array.astype("float32" if array.dtype.kind == "f" else "int32")


def batches_of(case):
    return [tuple(map(arrays, batch)) for batch in case["batches"]]


def metric_of(case):
    return getattr(metrics, case["name"])(**case["arguments"])


@pytest.mark.sampled(20)
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


@pytest.mark.slow
@pytest.mark.sampled(10)
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
    assert metric.additive == (type(metric).merge_variables is metrics.Metric.merge_variables), (
        "a metric that defines `merge_variables` says `additive = False`")
    assert all(variable.value.dtype == jnp.float32 and not variable.numpy().any() for variable in metric.variables)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows_of_weight_zero_are_as_if_absent(case):
    metric, without = metric_of(case), metric_of(case)
    batch = batches_of(case)[0]
    metric.update_state(*batch, sample_weight=np.array([1, 1, 1, 0, 0, 0], "float32"))
    without.update_state(*(values[:3] for values in batch), sample_weight=np.ones(3, "float32"))
    for one, other in zip(metric.variables, without.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(4)
@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_all_zero_give_a_number(case):
    metric = metric_of(case)
    batch = batches_of(case)[0]
    assert np.all(np.isfinite(metric(*batch, sample_weight=np.zeros(6, "float32"))))


@pytest.mark.sampled
@pytest.mark.every_case
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
    names = {cls.__name__ for cls in CLASSES}
    assert names == {case["name"] for case in REFERENCE["cases"]}, (
        "add its cases to tests/reference/make_metrics.py, and run that; or add it to trainer/metrics/registry.py")
    assert names <= set(metrics.__all__), "export it from trainer/metrics/__init__.pyi"


@pytest.mark.slow
def test_a_class_to_ignore_does_not_count_with_or_without_weights():
    y_true, y_pred = np.array([[0, -1, 1]]), np.array([[[0.5, 0.5], [0.9, 0.1], [0.75, 0.25]]])
    expected = (np.log(2) + np.log(4)) / 2
    for weight in (None, np.ones(1), np.ones((1, 3))):
        metric = metrics.SparseCategoricalCrossentropy(ignore_class=-1)
        np.testing.assert_allclose(metric(y_true, y_pred, sample_weight=weight), expected, rtol=1e-5)


@pytest.mark.parametrize(("y_true", "y_pred", "error"), [
    ([1, 0], [[0.75], [0.75]], 0.25), ([[1], [0]], [0.75, 0.75], 0.25), ([1, 1], [[0.25, 0.75]] * 2, 0.25),
    ([[0, 1], [1, 0]], [[0.25, 0.75], [0.75, 0.25]], 0.25), ([0, 1], [0.0, 1.0], 0.0), ([1, 0], [0.0, 1.0], 1.0)])
def test_a_calibration_error_takes_one_probability_or_one_of_each_class(y_true, y_pred, error):
    assert float(metrics.ExpectedCalibrationError()(y_true, y_pred)) == pytest.approx(error)


def test_a_calibration_error_of_logits_is_that_of_their_probabilities():
    logits, labels = np.array([[2.0], [-1.0], [0.5]]), [1, 0, 0]
    of_logits = metrics.ExpectedCalibrationError(from_logits=True)(labels, logits)
    assert float(of_logits) == pytest.approx(float(metrics.ExpectedCalibrationError()(labels, jax.nn.sigmoid(logits))))


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


def test_a_function_that_returns_a_scalar_counts_for_each_row_of_its_batch():
    metric = metrics.MeanMetricWrapper(lambda y_true, y_pred: jnp.sqrt(jnp.mean(jnp.square(y_true - y_pred))))
    metric.update_state(np.zeros((3, 1)), np.full((3, 1), 4.0))
    metric.update_state(np.zeros((1, 1)), np.full((1, 1), 8.0))
    assert float(metric.result()) == 5.0


def test_a_scalar_of_a_batch_cannot_be_weighted_by_rows():
    metric = metrics.MeanMetricWrapper(lambda y_true, y_pred: jnp.mean(jnp.abs(y_true - y_pred)))
    with pytest.raises(ValueError, match=r"or one scalar for a batch without weights.*shape \(\)"):
        metric(np.zeros((3, 1)), np.ones((3, 1)), sample_weight=[1, 1, 0])


COUNTING = [metrics.AUC(), metrics.AUC(multi_label=True, num_labels=3), metrics.Precision(thresholds=[0.2, 0.5]),
            metrics.Recall(thresholds=[0.2, 0.5], top_k=2), metrics.RecallAtPrecision(0.5), metrics.OneHotMeanIoU(3)]


def updated(metric):
    rows = [jax.ShapeDtypeStruct((64, 3), jnp.float32)] * 2
    weights = jax.ShapeDtypeStruct((64,), jnp.float32)
    return jax.jit(lambda variables, y_true, y_pred, weights: metric.stateless_update_state(
        variables, y_true, y_pred, sample_weight=weights)).trace(metric.stateless_reset_state(), *rows, weights)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("metric", COUNTING, ids=lambda metric: metric.name)
def test_counts_have_no_loop_on_gpus_and_no_scatter_whose_sums_change_from_run_to_run(metric):
    assert "stablehlo.scatter" in updated(metric).lower().as_text()  # that of this CPU
    for_gpus = updated(metric).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.scatter" not in for_gpus
    assert "stablehlo.while" not in for_gpus


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 3])
def test_sums_of_buckets_are_the_same_on_every_platform(columns):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(0, 9, (50, columns)), jnp.float32)  # whole numbers, whose sums are exact
    buckets, numbers = jnp.asarray(rng.integers(0, 7, (50, columns))), jnp.arange(7)
    expected = np.zeros((7, columns), np.float32)
    for row, column in np.ndindex(50, columns):
        expected[buckets[row, column], column] += values[row, column]
    for sums in (metric_arrays._scattered, metric_arrays._compared):
        np.testing.assert_array_equal(sums(values, buckets, numbers), expected)
    np.testing.assert_array_equal(metric_arrays.sums_by_bucket(values, buckets, 7), expected)


@pytest.mark.slow
def test_a_score_that_is_no_number_counts_as_above_every_threshold():
    metric = metrics.AUC(thresholds=[0.5])
    metric.update_state([1, 0], [np.nan, np.nan])
    assert metric.true_positives.numpy().tolist() == metric.false_positives.numpy().tolist() == [1.0] * 3
