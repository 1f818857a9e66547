"""Every metric beside Keras's: results after several updates with generated data and weights; configurations; names."""

import json

import numpy as np
import pytest

from tests.support import keras_comparison as compare
from tests.support.keras_cases import LOSSES, METRIC_FUNCTIONS, METRICS
from tests.support.keras_inputs import INPUTS, WEIGHTS
from trainer import losses, metrics

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")

# Keras's, about its integers.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

ROWS = (4, 2)  # of the updates: a mean of means would be noticed
FIRST = 2  # cases of a metric, which `make test-rest` runs; quick are the stored results of `test_metrics.py`
CASES = [pytest.param(name, *case, id="-".join([name, *map(str, case[0].values()), case[1]]),
                      marks=[pytest.mark.slow] + [pytest.mark.every_case] * (number < FIRST))
         for name, cases in METRICS.items() for number, case in enumerate(cases)]
# Metrics that Keras lacks, and other names. Not here: what the names of tests/support/keras_differences.py are about.
OURS_ALONE = {"ExpectedCalibrationError",
              "AUCCurve", "AUCSummationMethod", "LossMetric", "Variable", "accuracy", "resolve", "cosine_similarity"}


def in_32_bits(values):
    return values.astype("float32" if values.dtype.kind == "f" else "int32")


def made(library, name, arguments):
    if "fn" in arguments:
        arguments = {**arguments, "fn": getattr(library.losses, arguments["fn"])}
    return getattr(library.metrics, name)(**arguments)


class Ours:
    losses, metrics = losses, metrics


def result(library, name, arguments, batches, weights):
    metric = made(library, name, arguments)
    for batch, weight in zip(batches, weights, strict=True):
        metric.update_state(*batch, **({} if weight is None else {"sample_weight": weight}))
    return metric.result()


def compare_case(name, arguments, kind, weight_kinds, seed=0):
    random = compare.generator(name, arguments, kind, seed)
    batches = [tuple(map(in_32_bits, INPUTS[kind](random, rows))) for rows in ROWS]
    for weights in weight_kinds:
        drawn = [WEIGHTS[weights](random, (rows,)) for rows in ROWS]
        given = [None if each is None else np.asarray(each, "float32") for each in drawn]
        outcomes = [compare.outcome(result, library, name, arguments, batches, given) for library in (Ours, keras)]
        compare.check_equal("metrics", *outcomes, f"{name}({arguments}) of {kind!r}, seed {seed}, weights {weights!r}")


def fitting(name):
    """Returns the kinds of weights in which both compute: one for each row."""
    kinds = ["none", "rows", "some zeros", "whole numbers", "negative", "zeros"]
    # With which rows of weight 0, or a single row that is left, give NaN there.
    return ["none", "rows", "negative"] if name == "R2Score" else kinds


@pytest.mark.parametrize(("name", "arguments", "kind"), CASES)
def test_results_are_those_of_keras(name, arguments, kind):
    compare_case(name, arguments, kind, ["none", "rows"])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(("name", "arguments", "kind"), CASES)
def test_results_of_more_data_are_those_of_keras(name, arguments, kind, seed):
    compare_case(name, arguments, kind, fitting(name), seed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "kind"), [
    ("AUC", {"curve": "PR"}, "bit per row"), ("AUC", {}, "bit per row"), ("Precision", {}, "bit per row"),
    ("MeanIoU", {"num_classes": 3, "dtype": "float32"}, "class pairs"), ("MeanSquaredError", {}, "numbers")])
def test_negative_weights_and_weights_of_zero_are_kerass(name, arguments, kind):
    compare_case(name, arguments, kind, ["negative", "zeros"])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("function", sorted(METRIC_FUNCTIONS))
def test_a_function_gives_the_numbers_of_kerass(function):
    for arguments, kind in (METRICS | LOSSES)[METRIC_FUNCTIONS[function]]:
        if kind in ("column", "bit column"):  # whose ranks Keras's classes match, and its functions do not
            continue
        values = [in_32_bits(each) for each in INPUTS[kind](compare.generator(function, arguments, kind), 4)]
        if values[0].shape == values[1].shape:
            values[0] = values[0].astype("float32")
        ours, theirs = (compare.outcome(getattr(library, function), *values, **arguments)
                        for library in (metrics, keras.metrics))
        compare.check_equal("metrics", ours, theirs, f"{function}({arguments}) of {kind!r}")


def test_every_public_name_of_keras_is_here_and_compared():
    classes = compare.without(compare.public_names(keras.metrics, compare.is_class), {"Metric"})
    assert classes == set(METRICS)
    functions = compare.without(compare.public_names(keras.metrics, compare.is_function),
                                {"get", "serialize", "deserialize"})
    assert functions == set(METRIC_FUNCTIONS)
    found = set(metrics.__all__) - OURS_ALONE
    assert found == {*classes, *functions, "Metric", "get", "serialize", "deserialize"}, (
        "list a metric that Keras lacks in OURS_ALONE")


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", sorted(METRICS))
def test_configurations_hold_what_kerass_hold_and_go_both_ways(name):
    for arguments, kind in METRICS[name]:
        ours, theirs = (made(library, name, {**arguments, "name": "mine"}) for library in (Ours, keras))
        config, kerass = ours.get_config(), theirs.get_config()
        compare.COUNTS["metrics"] += 1
        for key, value in kerass.items():
            np.testing.assert_equal(config[key], np.asarray(value).tolist() if key == "label_weights" else value, key)
        assert set(config) - set(kerass) <= {"axis", "from_sorted_ids"}, "see tests/support/keras_differences.py"
        again = metrics.deserialize(json.loads(json.dumps(metrics.serialize(ours))))
        assert type(again) is type(ours) and again.get_config() == config
        batch = [in_32_bits(each) for each in INPUTS[kind](compare.generator(name), 4)]
        np.testing.assert_array_equal(again(*batch), ours(*batch))
        read = metrics.get(keras.metrics.serialize(theirs))
        assert type(read) is type(ours)
        if set(config) == set(kerass):
            np.testing.assert_array_equal(read(*batch), again.result())


def test_a_mean_of_a_loss_is_made_of_its_configuration():
    metric = metrics.LossMetric(losses.Huber(delta=2.0), name="mine")
    again = metrics.deserialize(json.loads(json.dumps(metrics.serialize(metric))))
    assert (again.name, again.loss.delta) == ("mine", 2.0)

    def gap(y_true, y_pred):
        return y_pred - y_true

    own = metrics.MeanMetricWrapper(gap, name="gap")
    assert type(own).from_config(own.get_config()).get_config()["fn"] is gap


def test_nothing_gives_no_metric():
    assert metrics.get(None) is None and keras.metrics.get(None) is None


@pytest.mark.parametrize(("cls", "arguments", "words"), [
    ("Precision", {"thresholds": [-1.0, 2.0]}, r"Threshold values must be in \[0, 1\]. Received: \[-1.0, 2.0\]"),
    ("Precision", {"thresholds": [None]}, r"Threshold values must be in \[0, 1\]. Received: \[None\]"),
    ("AUC", {"num_thresholds": 1}, "Argument `num_thresholds` must be an integer > 1"),
    ("AUC", {"curve": "X"}, 'Invalid AUC curve value: "X"'),
    ("AUC", {"summation_method": "X"}, "Invalid AUC summation method value"),
    ("SensitivityAtSpecificity", {"specificity": 2.0}, r"`specificity` must be in the range \[0, 1\]"),
    ("FBetaScore", {"beta": 0.0}, r"Invalid `beta` argument value. It should be > 0"),
    ("FBetaScore", {"threshold": 2.0}, r"Invalid `threshold` argument value. It should verify 0 < threshold <= 1"),
    ("FBetaScore", {"average": "X"}, "Invalid `average` argument value"),
    ("R2Score", {"class_aggregation": "X"}, "Invalid value for argument `class_aggregation`"),
    ("R2Score", {"num_regressors": -1}, "Invalid value for argument `num_regressors`"),
    ("IoU", {"num_classes": 2, "target_class_ids": [2]}, "Target class id 2"),
])
def test_errors_are_of_kerass_type_and_substance(cls, arguments, words):
    for library in (metrics, keras.metrics):
        with pytest.raises(ValueError, match=words):
            getattr(library, cls)(**arguments)


@pytest.mark.parametrize(("cls", "shapes", "words"), [
    ("FBetaScore", ((3,), (3,)), "FBetaScore expects 2D inputs with shape"),
    ("R2Score", ((3,), (3,)), "expects 2D inputs with shape"),
])
def test_errors_about_shapes_are_of_kerass_type_and_substance(cls, shapes, words):
    for library in (metrics, keras.metrics):
        with pytest.raises(ValueError, match=words):
            getattr(library, cls)().update_state(*(np.zeros(shape, "float32") for shape in shapes))
