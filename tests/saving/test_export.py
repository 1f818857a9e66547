"""An exported model gives the numbers of `predict` without the model's code, or says why it cannot."""

import collections
import functools
import json
import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from tests.support.strategy_cases import LAYOUT, STRATEGIES, LinenNet
from trainer import distribute
from trainer.engine.saving import export
from trainer.engine.saving.arrays.safetensors_file import checksum, read_arrays, save_arrays
from trainer.engine.saving.export import load_exported

X, Y, _ = classification(40)
ROWS = (1, 3, 32)


class ByName(nn.Module):
    """Inputs by name, of several dtypes; a tuple with a dict and a list as outputs."""

    @nn.compact
    def __call__(self, tokens, image):
        features = nn.Embed(5, 4)(tokens).mean(1) + nn.Dense(4)(image.reshape(image.shape[0], -1))
        return features, {"scores": nn.Dense(2)(features), "more": [features.argmax(-1)]}


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, first, second):
        return nn.Dense(3)(first) * second


def named_inputs(rows):
    rng = np.random.default_rng(rows)
    return {"tokens": rng.integers(0, 5, (rows, 7)).astype(np.int32),
            "image": rng.normal(size=(rows, 2, 3)).astype(np.float32)}


def trained(module, **options):
    model = trainer.Model(module)
    model.compile("adam", logits_loss(), **options)
    model.fit(X, Y, epochs=2, verbose=0)
    return model


def built(module, x, **options):
    model = trainer.Model(module)
    model.compile("adam", **options)
    model.build(x)
    return model


def rows_of_x(rows):
    return X[:rows]


CASES = {  # the model, and its inputs of so many rows
    "linen": (lambda: trained(LinenMLP(batch_norm=True, dropout=0.5)), rows_of_x),
    "nnx": (lambda: trained(NNXMLP(batch_norm=True, dropout=0.5)), rows_of_x),
    "layers": (lambda: built([nn.Dense(4), nn.relu, nn.Dense(2)], X), rows_of_x),
    "moving_average": (lambda: trained(LinenMLP(), ema_decay=0.9), rows_of_x),
    "mixed_precision": (lambda: trained(LinenMLP(batch_norm=True), precision="mixed_bfloat16"), rows_of_x),
    "dict_inputs": (lambda: built(ByName(), named_inputs(4)), named_inputs),
    "tuple_inputs": (lambda: built(TwoInputs(), (X, X[:, :3])), lambda rows: (X[:rows], X[:rows, :3])),
}

IN_ANOTHER_PROCESS = """
import sys

import jax
import numpy as np

from trainer.engine.saving.export import load_exported

for name in sys.argv[2:]:
    exported = load_exported(f"{sys.argv[1]}/{name}.export")
    with np.load(f"{sys.argv[1]}/{name}.npz") as saved:
        specs, structure = jax.tree.flatten(exported.input_spec)
        results = {}
        for rows in (1, 3, 32):
            leaves = [saved[f"{rows}/{index}"] for index in range(len(specs))]
            outputs, told = jax.tree.flatten(exported(jax.tree.unflatten(structure, leaves)))
            results |= {f"{rows}/{index}": leaf for index, leaf in enumerate(outputs)}
    np.savez(f"{sys.argv[1]}/{name}.results.npz", structure=str(told), **results)
assert not {"tests", "flax.nnx"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def exported_case(tmp_path_factory):
    """A function that returns a case's model and the file that it was exported to."""
    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def exported(name):
        model = CASES[name][0]()
        model.export(folder / f"{name}.export")
        return model, folder / f"{name}.export"

    return exported


@pytest.fixture(scope="module")
def exported_cases(exported_case):
    """A folder with each case exported, and what another process, which does not import these tests, makes of it."""
    models = {}
    for name, (_, inputs) in CASES.items():
        models[name], path = exported_case(name)
        np.savez(path.with_suffix(".npz"), **{f"{rows}/{index}": leaf for rows in ROWS
                                              for index, leaf in enumerate(jax.tree.leaves(inputs(rows)))})
    folder = path.parent
    script = folder / "script.py"
    script.write_text(IN_ANOTHER_PROCESS)
    done = subprocess.run([sys.executable, str(script), str(folder), *CASES], cwd=folder, timeout=120, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, models


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_another_process_without_the_models_code_computes_what_predict_does(exported_cases, name):
    folder, models = exported_cases
    with np.load(folder / f"{name}.results.npz") as results:
        for rows in ROWS:
            expected, structure = jax.tree.flatten(models[name].predict(CASES[name][1](rows), verbose=0))
            assert str(results["structure"]) == str(structure)
            for index, leaf in enumerate(expected):
                found = results[f"{rows}/{index}"]
                assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
                tolerance = 2e-2 if name == "mixed_precision" else 1e-5
                np.testing.assert_allclose(found, leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_predict_of_the_loaded_model_takes_any_number_of_rows(exported_cases):
    folder, models = exported_cases
    exported = load_exported(folder / "linen.export")
    expected = models["linen"].predict(X, verbose=0)
    for batch_size in (None, 7, 1000):
        found = exported.predict(X, batch_size)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    outputs = load_exported(folder / "dict_inputs.export").predict(named_inputs(40))
    assert isinstance(outputs, tuple) and outputs[1]["scores"].shape == (40, 2) and outputs[1]["more"][0].shape == (40,)


@pytest.mark.slow
def test_a_loaded_model_tells_what_it_takes(exported_case):
    exported = load_exported(exported_case("dict_inputs")[1])
    spec = exported.input_spec["image"]
    assert (spec.shape[1:], spec.dtype, str(spec.shape[0])) == ((2, 3), np.float32, "rows")
    assert exported.batch_size is None and exported.platforms == ("cpu",)
    text = repr(exported)
    assert "'image': 'float32(rows, 2, 3)'" in text and "'scores': 'float32(rows, 2)'" in text
    assert repr(load_exported(exported_case("linen")[1])) == (
        "ExportedModel(float32(rows, 6) -> float32(rows, 3), for cpu)")


@pytest.mark.slow
def test_jax_arrays_lists_and_wider_dtypes_are_taken(exported_case):
    exported = load_exported(exported_case("linen")[1])
    expected = exported(X[:2])
    assert isinstance(expected, jax.Array)
    for x in (jnp.asarray(X[:2]), X[:2].astype(np.float64), X[:2].tolist()):
        np.testing.assert_allclose(exported(x), expected, rtol=1e-6)
    both = load_exported(exported_case("tuple_inputs")[1])
    np.testing.assert_array_equal(both([X[:2], X[:2, :3]]), both((X[:2], X[:2, :3])))


@pytest.mark.slow
def test_the_weights_are_in_the_file_once(tmp_path):
    model = built(nn.Dense(256), np.ones((1, 256), np.float32))
    model.export(tmp_path / "dense.export")
    assert os.path.getsize(tmp_path / "dense.export") < 1.1 * 4 * 256 * 256
    with read_arrays(tmp_path / "dense.export") as file:
        assert sorted(file) == ["params/bias", "params/kernel", "program"]
        np.testing.assert_array_equal(file["params/kernel"], model.state.params["kernel"])


@pytest.mark.slow
def test_with_moving_averages_these_are_the_weights(exported_case):
    model, path = exported_case("moving_average")
    state = model.state
    with read_arrays(path) as file:
        kernel = file["params/Dense_0/kernel"]
    np.testing.assert_array_equal(kernel, state.averaged().params["Dense_0"]["kernel"])
    assert np.any(kernel != state.params["Dense_0"]["kernel"])


@pytest.mark.slow
def test_training_goes_on_after_an_export(tmp_path):
    model = trained(LinenMLP(batch_norm=True))
    model.export(tmp_path / "model.export")
    exported = load_exported(tmp_path / "model.export")
    before = exported.predict(X)
    model.fit(X, Y, epochs=2, verbose=0)
    np.testing.assert_array_equal(exported.predict(X), before)
    assert np.any(model.predict(X, verbose=0) != before)


class Halves(trainer.Model):
    """Two modules, of which `predict` uses one."""

    def sample_inputs(self, batch):
        return {"used": batch, "other": batch}

    def predict_step(self, state, batch):
        x, _, _ = trainer.unpack_x_y_sample_weight(batch)
        return self.apply(state.params["used"], state, x, module="used")[0] * 2


@pytest.mark.slow
def test_an_overridden_predict_step_is_exported_with_the_weights_that_it_uses(tmp_path):
    path = tmp_path / "model.export"
    model = Halves({"used": nn.Dense(2), "other": nn.Dense(3)})
    model.build(X)
    with pytest.raises(ValueError, match=r"overrides `sample_inputs`.*Pass `sample`"):
        model.export(path)
    model.export(path, sample=X)
    with read_arrays(path) as file:
        assert sorted(file) == ["params/used/bias", "params/used/kernel", "program"]
    np.testing.assert_allclose(load_exported(path).predict(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


SPLIT = {
    "central_storage": STRATEGIES["central_storage"],
    "fully_sharded": STRATEGIES["fully_sharded"],
    "model_parallel": lambda: distribute.ModelParallelStrategy({"replica": 2, "model": 4}, layout_map=LAYOUT),
    "mirrored": lambda: mirrored(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_under_every_strategy_the_program_is_for_one_device(tmp_path, name):
    x = np.random.default_rng(0).normal(size=(10, 16)).astype(np.float32)
    with SPLIT[name]().scope():
        model = trainer.Model(LinenNet(batch_norm=True))
        model.compile("adam", logits_loss(), ema_decay=0.9)
    model.build(x)
    model.set_weights([np.random.default_rng(1).uniform(0.1, 1, leaf.shape) for leaf in model.get_weights()])
    model.export(tmp_path / "model.export")
    exported = load_exported(tmp_path / "model.export")
    outputs = exported(x)
    assert len(outputs.devices()) == 1
    np.testing.assert_allclose(outputs, model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


# --- numbers of rows --------------------------------------------------------------------------------------------------


class CountsRows(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x) * (1.0 if x.shape[0] > 2 else 2.0)


def test_a_model_that_must_know_the_number_of_rows_is_exported_for_one_number(tmp_path):
    path = tmp_path / "model.export"
    model = built(CountsRows(), X)
    with pytest.raises(ValueError, match=r"cannot be exported for any number of rows.*Pass `batch_size=32`"):
        model.export(path)
    assert not path.exists()
    model.export(path, batch_size=8)
    exported = load_exported(path)
    assert exported.batch_size == 8 and exported.input_spec.shape == (8, 6)
    assert repr(exported) == "ExportedModel(float32(8, 6) -> float32(8, 2), for cpu)"
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(exported(X[:8]), expected[:8], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(exported.predict(X[:21]), expected[:21], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"exported for batches of 8 rows. Received: 3 rows"):
        exported(X[:3])
    with pytest.raises(ValueError, match=r"exported for batches of 8 rows. Received: batch_size=4"):
        exported.predict(X, batch_size=4)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("flatten", [
    lambda x: x.reshape(len(x), -1), lambda x: x.reshape(int(x.shape[0]), -1), lambda x: x / float(x.shape[0]),
    lambda x: jnp.stack([x[row] for row in range(x.shape[0])]), lambda x: jnp.stack(list(x)),
    lambda x: x + np.zeros((x.shape[0], 1)),
])
def test_the_error_of_a_number_of_rows_that_becomes_an_integer_says_what_to_write(tmp_path, flatten):
    model = built(nn.Sequential([flatten, nn.Dense(2)]), X)
    with pytest.raises(ValueError, match=r"Write `x\.shape\[0\]` in place of `len\(x\)`.*pass `batch_size=32`"):
        model.export(tmp_path / "model.export")


@pytest.mark.slow
def test_a_number_of_rows_as_a_size_is_any_number(tmp_path):
    model = built(nn.Sequential([lambda x: x.reshape(x.shape[0], -1), nn.Dense(2)]), X)
    model.export(tmp_path / "model.export")
    assert load_exported(tmp_path / "model.export").batch_size is None


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.every_case
@pytest.mark.parametrize(("case", "x", "words"), [
    ("linen", X[:, :5], r"`x` must be float32\(rows, 6\), rows first. Received: array of shape \(40, 5\)"),
    ("linen", X[0], r"`x` must be float32\(rows, 6\)"),
    ("linen", X.astype(np.int32),
     r"`x` must be float32\(rows, 6\).* dtype int32.*float32 alone: convert it by `.astype\('float32'\)`"),
    ("linen", (X, X), r"`x` must be float32\(rows, 6\). Received: \(array"),
    ("linen", X[:0], "the same number of rows, at least one"),
    ("linen", np.full((2, 6), "a"), "numeric dtype"),
    ("linen", 3.0, "at least one dimension"),
    ("dict_inputs", X, r"`x` must be \{'image': 'float32\(rows, 2, 3\)', 'tokens': 'int32\(rows, 7\)'\}"),
    ("dict_inputs", {**named_inputs(4), "image": np.ones((4, 2, 4), np.float32)},
     r"`x\['image'\]` must be float32\(rows, 2, 3\)"),
    ("dict_inputs", {**named_inputs(4), "image": named_inputs(5)["image"]}, "the same number of rows"),
])
def test_inputs_that_are_not_like_those_of_the_model_are_refused(exported_case, case, x, words):
    exported = load_exported(exported_case(case)[1])
    for use in (exported, exported.predict):
        with pytest.raises(ValueError, match=words):
            use(x)


Point = collections.namedtuple("Point", "x y")


class InATuple(nn.Module):
    kind: str = "outputs"

    @nn.compact
    def __call__(self, x):
        return Point(nn.Dense(2)(x), x) if self.kind == "outputs" else nn.Dense(2)(x.x)


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_containers_that_need_the_models_code_are_refused(tmp_path, kind):
    model = built(InATuple(kind), X if kind == "outputs" else Point(X, X))
    with pytest.raises(TypeError, match=r"dicts with strings as keys, lists and tuples.*is of type Point"):
        model.export(tmp_path / "model.export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_refused_with_the_reason(tmp_path):
    class Prints(trainer.Model):
        def predict_step(self, state, batch):
            return batch * float(batch.mean())

    model = Prints(nn.Dense(2))
    model.build(X)
    with pytest.raises(ValueError, match=r"(?s)cannot be exported for cpu. ConcretizationTypeError"):
        model.export(tmp_path / "model.export")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("options", "error", "words"), [
    ({"platforms": "cpu"}, TypeError, r"`platforms` must be a list"),
    ({"platforms": []}, TypeError, r"`platforms` must be a list"),
    ({"platforms": ["cpu", "cudda"]}, ValueError, r"Unknown platform 'cudda'. Did you mean 'cuda'\?"),
    ({"batch_size": 0}, ValueError, r"`batch_size` must be a whole number of at least 1 or None"),
    ({"batch_size": 1.5}, TypeError, r"`batch_size` must be a whole number"),
])
def test_arguments_that_cannot_be_used_are_refused(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        built(LinenMLP(), X).export(tmp_path / "model.export", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_built_says_how_to_build_it(tmp_path):
    with pytest.raises(RuntimeError, match=r"Call `build\(sample\)`"):
        trainer.Model(LinenMLP()).export(tmp_path / "model.export")


@pytest.mark.slow
def test_a_model_for_other_platforms_is_written_here_and_refused_here(tmp_path):
    model = built(LinenMLP(), X)
    model.export(tmp_path / "both.export", platforms=("cuda", "cpu", "tpu"))
    exported = load_exported(tmp_path / "both.export")
    assert exported.platforms == ("cuda", "cpu", "tpu")
    np.testing.assert_allclose(exported.predict(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    model.export(tmp_path / "tpu.export", platforms=["tpu"])
    with pytest.raises(ValueError, match=r"was exported for tpu; this machine has cpu. Export .* `platforms`"):
        load_exported(tmp_path / "tpu.export")


def test_the_missing_package_is_named(tmp_path):
    model = built(LinenMLP(), X)
    model.export(tmp_path / "model.export")
    with mock.patch.dict(sys.modules, {"flatbuffers": None}):
        for use in (lambda: model.export(tmp_path / "other.export"), lambda: load_exported(tmp_path / "model.export")):
            with pytest.raises(ImportError, match=r"`flatbuffers`.*pip install"):
                use()


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "model.export"
    built(nn.Dense(2), X).export(path)
    return path.read_bytes()


@pytest.mark.slow
def test_any_flipped_bit_is_refused(small_file, tmp_path):
    path = tmp_path / "model.export"
    header = 8 + int.from_bytes(small_file[:8], "little")
    places = [*range(8), *range(8, header, 7), *range(header, header + 56), *range(header + 56, len(small_file), 97)]
    for place in places:
        for bit in (place % 8, 7):
            damaged = bytearray(small_file)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            # UnicodeDecodeError and JSON's errors are of this kind too, but are not what a user should read.
            with pytest.raises(ValueError, match=r"(?s)is damaged|damaged header|not a safetensors|cut short|too long|"
                                                 r"is another kind of file"):
                load_exported(path)


@pytest.mark.parametrize("size", [0, 7, 100, -1, -1000])
def test_a_file_cut_short_is_refused(small_file, tmp_path, size):
    path = tmp_path / "model.export"
    path.write_bytes(small_file[:size])
    with pytest.raises(ValueError, match="cut short"):
        load_exported(path)


def test_a_file_of_weights_and_one_of_a_model_are_told_apart(small_file, tmp_path):
    model = built(nn.Dense(2), X)
    exported, weights = tmp_path / "model.export", tmp_path / "model.safetensors"
    exported.write_bytes(small_file)
    model.save_weights(weights)
    with pytest.raises(ValueError, match=r"is another kind of file.*`load_weights`"):
        load_exported(weights)
    with pytest.raises(ValueError, match=r"is an exported model. `trainer.load_exported` loads it"):
        model.load_weights(exported)
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*model\.export"):
        load_exported(tmp_path / "model.exprt")


def rewritten(small_file, path, **changes):
    """Writes the file anew, with a manifest that was changed and a checksum that fits it."""
    path.write_bytes(small_file)
    with read_arrays(path) as file:
        arrays, metadata = dict(file), dict(file.metadata)
    arrays |= changes.pop("arrays", {})
    text = json.dumps({**json.loads(metadata[export.MANIFEST_KEY]), **changes})
    save_arrays(path, arrays, {**metadata, export.MANIFEST_KEY: text, "checksum": checksum(text, arrays)})


def test_a_later_format_and_a_program_that_jax_cannot_read_are_refused(small_file, tmp_path):
    path = tmp_path / "model.export"
    rewritten(small_file, path, format_version=2)
    with pytest.raises(ValueError, match=r"has version 2 of the format.*knows version 1"):
        load_exported(path)
    with read_arrays(path) as file:
        program = file["program"].tobytes()
    unknown = program.replace(b"dot_general_v", b"dot_general_w")  # as an operation of a later JAX would be
    assert unknown != program
    for other in (bytes(100), unknown):
        rewritten(small_file, path, jax="9.9", arrays={"program": np.frombuffer(other, np.uint8)})
        with pytest.raises(ValueError, match=r"was exported with JAX 9\.9, and JAX .* cannot read it"):
            load_exported(path)


@pytest.mark.slow
def test_an_export_replaces_a_file_whole_or_leaves_it(tmp_path):
    path = tmp_path / "model.export"
    path.write_text("something of value")
    model = built(nn.Dense(2), X)
    with mock.patch("os.replace", side_effect=OSError("no")), pytest.raises(OSError, match="no"):
        model.export(path)
    assert path.read_text() == "something of value" and list(tmp_path.iterdir()) == [path]
    model.export(path)
    assert load_exported(path)(X).shape == (40, 2)


def test_of_several_processes_the_first_one_writes(tmp_path):
    with mock.patch("jax.process_index", return_value=1):
        built(nn.Dense(2), X).export(tmp_path / "model.export")
    assert list(tmp_path.iterdir()) == []
