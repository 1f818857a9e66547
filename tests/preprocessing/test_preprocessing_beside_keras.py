"""Preprocessing layers have Keras's numbers: reference/preprocessing.json, of reference/make_preprocessing.py."""

import json
import pathlib

import jax
import numpy as np
import pytest

from trainer.data import Dataset, preprocessing
from trainer.data.preprocessing.registry import CLASSES

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "preprocessing.json").read_text())
INPUTS = REFERENCE["inputs"]
OF_NUMBERS = ("Normalization", "Discretization", "CategoryEncoding", "IntegerLookup")


def case_id(case):
    config = "-".join(f"{key}={value}" for key, value in case["config"].items() if not isinstance(value, list))
    return "-".join([case["layer"], *filter(None, [config, case["adapt"]]), case["inputs"]])


def layer_of(case):
    layer = getattr(preprocessing, case["layer"])(**case["config"])
    if case["adapt"] is not None:
        data = INPUTS[case["adapt"]]
        layer.adapt((np.asarray(batch) for batch in data) if case["adapt"].endswith("batches") else data)
    return layer


def check(received, expected, kind):
    received = np.asarray(received)
    assert received.dtype.kind == kind or (received.dtype.kind, kind) == ("U", "O")
    if kind == "f":
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)
    else:
        assert received.tolist() == expected


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=case_id)
def test_a_layer_gives_the_numbers_of_keras(case):
    layer = layer_of(case)
    if "vocabulary" in case:
        assert layer.get_vocabulary() == case["vocabulary"]
    if "bin_boundaries" in case:
        np.testing.assert_allclose(layer.bin_boundaries, case["bin_boundaries"], rtol=1e-6)
    check(layer(INPUTS[case["inputs"]]), case["result"], case["kind"])


@pytest.mark.parametrize("case", [case for case in REFERENCE["cases"] if case["adapt"] is not None], ids=case_id)
def test_a_layer_made_of_its_plain_data_gives_the_same(case):
    layer = layer_of(case)
    again = type(layer).from_config(json.loads(json.dumps(layer.get_config())))
    assert np.array_equal(layer(INPUTS[case["inputs"]]), again(INPUTS[case["inputs"]]))


def traceable(case):
    return case["layer"] in OF_NUMBERS and case["config"].get("oov_method") != "farmhash"


@pytest.mark.sampled
@pytest.mark.parametrize("case", [case for case in REFERENCE["cases"] if traceable(case)], ids=case_id)
def test_a_layer_of_numbers_gives_them_in_a_program(case):
    layer, inputs = layer_of(case), np.asarray(INPUTS[case["inputs"]])
    if case["layer"] == "IntegerLookup":
        inputs = np.where(inputs < -2**31, -8, inputs)  # as int32
        inputs = np.where(inputs >= 2**31, 2**31 - 1, inputs)
        expected = layer(inputs)
    else:
        expected = case["result"]
    if case["layer"] == "IntegerLookup" and max(map(abs, layer.get_vocabulary())) > 2**31 - 1:
        with pytest.raises(ValueError, match="must fit into int32"):
            jax.jit(layer)(inputs)
        return
    received = jax.jit(layer)(inputs.astype(np.float32 if inputs.dtype.kind == "f" else np.int32))
    assert isinstance(received, jax.Array)
    check(received, np.asarray(expected).tolist(), case["kind"])


def made_space(case):
    make = preprocessing.FeatureSpace
    features = {name: kind if isinstance(kind, str) else getattr(make, kind[0])(**kind[1])
                for name, kind in case["features"].items()}
    crosses = [make.cross(**cross) if isinstance(cross, dict) else cross for cross in case["crosses"] or ()]
    return make(features, output_mode=case["output_mode"], crosses=crosses)


@pytest.mark.parametrize("case", REFERENCE["spaces"], ids=lambda case: str(next(iter(case["features"].values()))))
def test_a_feature_space_gives_the_numbers_of_keras(case, tmp_path):
    space = made_space(case)
    space.adapt(REFERENCE["table"])
    space.save(tmp_path / "space.json")
    for one in (space, preprocessing.load(tmp_path / "space.json")):
        for data, expected in ((REFERENCE["rows"], case["result"]),
                               ({name: column[0] for name, column in REFERENCE["rows"].items()}, case["row"])):
            received = one(data)
            if case["output_mode"] == "concat":
                received, expected = {"all": received}, {"all": expected}
            assert list(received) == list(expected)
            for name, values in received.items():
                np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_reference_covers_every_layer():
    rescaling = {"Rescaling"}  # a part of the feature spaces
    assert {case["layer"] for case in REFERENCE["cases"]} | rescaling == {cls.__name__ for cls in CLASSES}
    assert REFERENCE["origin"].startswith("Keras 3.15.1, JAX backend, TensorFlow")


def test_a_dataset_adapts_as_its_batches_do():
    words = np.array(INPUTS["words"])
    whole, batched, rows = (preprocessing.StringLookup() for _ in range(3))
    whole.adapt(words)
    dataset = Dataset.from_arrays((words, np.arange(len(words)))).shuffle(1)
    batched.adapt(dataset.batch(7))
    rows.adapt(dataset)
    assert whole.get_vocabulary() == batched.get_vocabulary() == rows.get_vocabulary()
