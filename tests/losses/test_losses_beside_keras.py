"""Every loss beside Keras's: numbers for generated labels, predictions, weights and dtypes; configurations; names."""

import json
import os

import numpy as np
import pytest

from tests.support import keras_comparison as compare
from tests.support.keras_cases import LOSS_FUNCTIONS, LOSSES
from tests.support.keras_inputs import INPUTS, WEIGHTS
from trainer import losses

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras = pytest.importorskip("keras")

REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", None)
DTYPES = (("float32", "float32"), ("uint8", "float64"), ("int32", "float16"), ("bool", "float32"))
OF_BATCH = ("Dice", "Tversky")  # one value, for `axis=None`, which rows' weights cannot weigh
OF_INDICES = ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy", "CTC", "Circle")
OURS_ALONE = {"as_loss", "LinearLogits"}  # losses that Keras lacks, and other names
SLOW = ("CTC", "Circle")  # many operations, each of which is compiled for each shape
FIRST = 3  # cases of a loss, which `make test-rest` runs; quick are the stored numbers of `test_losses.py`
CASES = [pytest.param(name, *case, id="-".join([name, *map(str, case[0].values()), case[1]]),
                      marks=[pytest.mark.slow] + [pytest.mark.every_case] * (name not in SLOW and number < FIRST))
         for name, cases in LOSSES.items() for number, case in enumerate(cases)]


def typed(values, dtype):
    """Returns values in a dtype, if it holds them; in the first of their kind otherwise."""
    converted = np.asarray(values).astype(dtype)
    is_held = np.array_equal(converted, values) or dtype.startswith("float")
    return converted if is_held else np.asarray(values, "float32")


def compare_case(name, arguments, kind, rows, seeds, is_thorough):
    for seed in seeds:
        random = compare.generator(name, arguments, kind, rows, seed)
        y_true, y_pred = INPUTS[kind](random, rows)
        first = random.integers(len(DTYPES))
        dtypes = DTYPES if is_thorough else [DTYPES[first], DTYPES[first - 1]]
        for number, (true_dtype, pred_dtype) in enumerate(dtypes):
            labels = y_true if name in OF_INDICES else typed(y_true, true_dtype)
            predictions = y_pred.astype(pred_dtype)
            shape = np.shape(getattr(keras.losses, name)(**arguments, reduction=None)(labels, predictions))
            kinds = ["none", "scalar"] if name in OF_BATCH and not shape else [
                "none", "scalar", *(("values",) if len(shape) > 1 else (each for each in WEIGHTS if each != "column"))]
            for index, weights in enumerate(kinds):
                sample_weight = WEIGHTS[weights](random, shape)
                chosen = REDUCTIONS if is_thorough or (weights in ("rows", "values") and not number) else (
                    REDUCTIONS[(index + number + seed) % len(REDUCTIONS)],)
                for reduction in chosen:
                    outcomes = [
                        compare.outcome(getattr(library, name)(**arguments, reduction=reduction), labels, predictions,
                                        sample_weight=sample_weight) for library in (losses, keras.losses)]
                    compare.check_equal("losses", *outcomes, f"{name}({arguments}) of {kind!r}, seed {seed}, "
                                        f"{labels.dtype} and {pred_dtype}, weights {weights!r}, {reduction}")


@pytest.mark.parametrize(("name", "arguments", "kind"), CASES)
def test_numbers_are_those_of_keras(name, arguments, kind):
    compare_case(name, arguments, kind, rows=4, seeds=range(1), is_thorough=False)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize(("name", "arguments", "kind"), CASES)
def test_numbers_of_more_inputs_are_those_of_keras(name, arguments, kind, rows):
    seeds = range(1, int(os.environ.get("TRAINER_KERAS_SEEDS", "3")))
    compare_case(name, arguments, kind, rows, seeds, is_thorough=True)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("function", sorted(LOSS_FUNCTIONS))
def test_a_function_gives_the_numbers_of_kerass(function):
    for arguments, kind in LOSSES[LOSS_FUNCTIONS[function]]:
        if kind in ("column", "bit column"):  # whose ranks Keras's classes match, and its functions do not
            continue
        values = [each.astype("float32" if each.dtype.kind == "f" else "int32")
                  for each in INPUTS[kind](compare.generator(function, arguments, kind), 4)]
        if function in ("huber", "tversky", "dice", "circle", "ctc") or values[0].shape == values[1].shape:
            values = [values[0] if function in ("ctc", "circle") else values[0].astype("float32"), values[1]]
        arguments = getattr(losses, LOSS_FUNCTIONS[function])(**arguments).arguments
        ours, theirs = (compare.outcome(getattr(library, function), *values, **arguments)
                        for library in (losses, keras.losses))
        compare.check_equal("losses", ours, theirs, f"{function}({arguments}) of {kind!r}")


def test_every_public_name_of_keras_is_here_and_compared():
    classes = compare.without(compare.public_names(keras.losses, compare.is_class), {"Loss"})
    assert classes == set(LOSSES)
    functions = compare.without(compare.public_names(keras.losses, compare.is_function),
                                {"get", "serialize", "deserialize"})
    assert functions == set(LOSS_FUNCTIONS)
    found = set(losses.__all__) - OURS_ALONE
    assert found == {*classes, *functions, "Loss", "get", "serialize", "deserialize"}, (
        "list a loss that Keras lacks, and its function, in OURS_ALONE")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_configurations_hold_what_kerass_hold_and_go_both_ways(name):
    for arguments, _ in LOSSES[name]:
        ours, theirs = (getattr(library, name)(**arguments, reduction="sum", name="mine")
                        for library in (losses, keras.losses))
        config, kerass = ours.get_config(), theirs.get_config()
        compare.COUNTS["losses"] += 1
        assert {key: config[key] for key in kerass} == kerass
        assert set(config) - set(kerass) <= {"axis", "delta"}, "see tests/support/keras_differences.py"
        plain = json.loads(json.dumps(losses.serialize(ours)))
        again = losses.deserialize(plain)
        assert type(again) is type(ours) and json.loads(json.dumps(again.get_config())) == plain["config"]
        assert losses.get(keras.losses.serialize(theirs)).get_config().items() >= {**kerass}.items()


@pytest.mark.parametrize("name", sorted(LOSS_FUNCTIONS))
def test_a_serialized_function_is_found_again(name):
    assert losses.serialize(getattr(losses, name)) == keras.losses.serialize(getattr(keras.losses, name))
    assert losses.deserialize(keras.losses.serialize(getattr(keras.losses, name))) is getattr(losses, name)


def test_a_loss_of_ones_own_is_made_of_its_configuration_with_custom_objects():
    class Gap(losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred - y_true

    plain = losses.serialize(Gap(reduction="sum"))
    assert losses.deserialize(plain, {"Gap": Gap}).reduction == "sum"
    with pytest.raises(ValueError, match=r"Unknown loss 'Gap'"):
        losses.deserialize(plain)


@pytest.mark.parametrize(("config", "message"), [
    (3, "`config` must be the configuration of a loss"), ({"class_name": 3}, "a dict with 'class_name' and 'config'")])
def test_what_is_no_configuration_is_refused(config, message):
    with pytest.raises(TypeError, match=message):
        losses.deserialize(config)


def test_what_cannot_be_serialized_is_refused():
    with pytest.raises(TypeError, match="an object with `get_config`, or a function with a name"):
        losses.serialize(3)


@pytest.mark.parametrize(("cls", "arguments", "words"), [
    ("MeanSquaredError", {"reduction": "average"}, "Invalid value for argument `reduction`"),
    ("CategoricalGeneralizedCrossEntropy", {"q": 1.5}, "q"),
])
def test_errors_are_of_kerass_type_and_substance(cls, arguments, words):
    for library in (losses, keras.losses):
        with pytest.raises(ValueError, match=words):
            getattr(library, cls)(**arguments)
