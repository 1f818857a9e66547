"""Models exported for other programs compute there what `predict` does: StableHLO, TensorFlow's SavedModel, ONNX."""

import importlib.util
import inspect
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss
from trainer import models
from trainer.engine.saving import formats, onnx_format
from trainer.engine.saving.arrays.safetensors_file import read_arrays
from trainer.tools.command_line import inspection

X, Y, _ = classification(40)
RNG = np.random.default_rng(0)
ONNX = pytest.mark.skipif(importlib.util.find_spec("jax2onnx") is None, reason="jax2onnx is not installed")


class ByName(nn.Module):
    """Inputs by name, of several dtypes; a tuple with a dict and a list as outputs."""

    @nn.compact
    def __call__(self, tokens, image):
        features = nn.Embed(5, 4)(tokens).mean(1) + nn.Dense(4)(image.reshape(image.shape[0], -1))
        return features, {"scores": nn.Dense(2)(features), "more": [nn.softmax(features)]}


class Pools(nn.Module):
    """What images go through: convolutions and both kinds of pooling."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(6, (3, 3), strides=2)(x)), (3, 3), strides=(2, 2), padding="SAME")
        return nn.Dense(3)(nn.avg_pool(x, (2, 2), strides=(1, 1)).mean((1, 2)))


def named_inputs(rows):
    return {"tokens": RNG.integers(0, 5, (rows, 7)).astype(np.int32),
            "image": RNG.normal(size=(rows, 2, 3)).astype(np.float32)}


def images(rows):
    return RNG.normal(size=(rows, 17, 17, 3)).astype(np.float32)


def trained(module, **options):
    model = trainer.Model(module)
    model.compile("adam", logits_loss(), **options)
    model.fit(X, Y, epochs=1, verbose=0)
    return model


def built(module, x):
    model = trainer.Model(module)
    model.build(x)
    return model


CASES = {  # the model, its inputs of so many rows, and the names of inputs and outputs
    "linen": (lambda: trained(LinenMLP(batch_norm=True, dropout=0.5), ema_decay=0.9),
              lambda rows: RNG.normal(size=(rows, 6)).astype(np.float32), ["x"], ["outputs"]),
    "nnx": (lambda: trained(NNXMLP(batch_norm=True)), lambda rows: RNG.normal(size=(rows, 6)).astype(np.float32),
            ["x"], ["outputs"]),
    "by_name": (lambda: built(ByName(), named_inputs(4)), named_inputs, ["image", "tokens"],
                ["outputs_0", "outputs_1_more_0", "outputs_1_scores"]),
    "images": (lambda: built(Pools(), images(1)), images, ["x"], ["outputs"]),
}


def expected(model, x):
    return jax.tree.leaves(model.predict(x, verbose=0))


# --- StableHLO -------------------------------------------------------------------------------------------------------


def interpreted(folder, x, bytecode=False):
    """Returns what StableHLO's reference interpreter computes: it knows nothing of JAX."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    signature = json.loads((folder / "signature.json").read_text())
    inputs = iter(jax.tree.leaves(x))
    with read_arrays(folder / "weights.safetensors") as weights:
        values = [weights[each["weight"]] if "weight" in each else next(inputs) for each in signature["arguments"]]
    with mlir.make_ir_context() as context:
        module = (stablehlo.deserialize_portable_artifact(context, (folder / "model.mlirbc").read_bytes())
                  if bytecode else ir.Module.parse((folder / "model.mlir").read_text()))
        attributes = [ir.DenseElementsAttr.get(np.ascontiguousarray(value)) for value in values]
        return [np.array(result) for result in stablehlo.eval_module(module, attributes)], signature


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "by_name"])
def test_a_stablehlo_program_is_evaluated_by_another_runtime(tmp_path, name):
    make, inputs, input_names, output_names = CASES[name]
    model = make()
    model.export(tmp_path / "model", format="stablehlo")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "model.mlir", "model.mlirbc", "signature.json", "weights.safetensors"}
    for rows, bytecode in ((1, False), (5, True)):
        x = inputs(rows)
        found, signature = interpreted(tmp_path / "model", x, bytecode)
        for one, other in zip(found, expected(model, x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    arguments = signature["arguments"]
    assert [each["input"] for each in arguments if "input" in each] == input_names
    assert [each["output"] for each in signature["results"]] == output_names
    assert all(each["shape"][0] is None for each in arguments if "input" in each)
    assert "shape_assertion" not in (tmp_path / "model" / "model.mlir").read_text()


@pytest.mark.slow
def test_a_stablehlo_program_for_one_number_of_rows(tmp_path):
    model = CASES["images"][0]()
    model.export(tmp_path / "model", format="stablehlo", batch_size=2)
    with pytest.raises(ValueError, match=r"is a StableHLO export, for other programs\. Export .* `format='jax'`"):
        trainer.load_exported(tmp_path / "model")
    x = images(2)
    found, signature = interpreted(tmp_path / "model", x)
    np.testing.assert_allclose(found[0], expected(model, x)[0], rtol=1e-4, atol=1e-5)
    assert signature["arguments"][-1] == {"input": "x", "shape": [2, 17, 17, 3], "dtype": "float32"}
    assert "tensor<2x17x17x3xf32>" in (tmp_path / "model" / "model.mlir").read_text()


@pytest.mark.slow
def test_an_export_does_not_depend_on_the_folders_of_its_code(tmp_path):
    contents = []
    for name in ("one", "another"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "net.py").write_text(f"from flax import linen as nn\n\n{inspect.getsource(Pools)}")
        spec = importlib.util.spec_from_file_location("net", folder / "net.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = built(module.Pools(), images(1))
        limit = jax.config.jax_traceback_in_locations_limit
        model.export(folder / "model.export")
        model.export(folder / "model", format="stablehlo")
        assert jax.config.jax_traceback_in_locations_limit == limit
        contents.append([(folder / "model.export").read_bytes(), (folder / "model" / "model.mlirbc").read_bytes()])
    assert contents[0] == contents[1]
    assert all(b".py" not in content and str(tmp_path).encode() not in content for content in contents[0])


@pytest.mark.slow
def test_an_export_is_replaced_and_something_else_is_not(tmp_path):
    model = built(nn.Dense(2), X)
    model.export(tmp_path / "model", format="stablehlo")
    model.set_weights([2 * weight + 1 for weight in model.get_weights()])
    model.export(tmp_path / "model", format="stablehlo")
    np.testing.assert_allclose(interpreted(tmp_path / "model", X)[0][0], expected(model, X)[0], rtol=1e-5, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is no folder that was exported as 'stablehlo'"):
        model.export(tmp_path / "mine", format="stablehlo")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_stablehlo_export_is_inspected(tmp_path):
    built(nn.Dense(2), X).export(tmp_path / "model", format="stablehlo")
    found = inspection.inspect(str(tmp_path / "model"))
    assert found.kind.startswith("exported model") and not found.problems
    assert [row.name for row in found.arrays] == ["params/bias", "params/kernel"]
    assert found.facts["inputs"] == "float32(rows, 6)" and found.facts["platform"] == "cpu"
    (tmp_path / "model" / "model.mlir").write_text("changed")
    assert "has other bytes" in inspection.inspect(str(tmp_path / "model")).problems[0]
    (tmp_path / "model" / "model.mlirbc").unlink()
    assert "FileNotFoundError" in inspection.inspect(str(tmp_path / "model")).problems[0]


# --- SavedModel ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tf():
    """TensorFlow, which sets environment variables when it is imported."""
    return pytest.importorskip("tensorflow")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_tensorflow_computes_what_predict_does(tf, tmp_path, name):
    make, inputs, input_names, output_names = CASES[name]
    model = make()
    model.export(tmp_path / "model", format="saved_model")
    assert b".py" not in (tmp_path / "model" / "saved_model.pb").read_bytes()  # no paths of this machine
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    serve = loaded.signatures["serving_default"]
    for rows in (1, 5):
        x = inputs(rows)
        found = serve(**dict(zip(input_names, map(tf.constant, jax.tree.leaves(x)), strict=True)))
        assert sorted(found) == output_names
        for output, other in zip(output_names, expected(model, x), strict=True):
            np.testing.assert_allclose(found[output].numpy(), other, rtol=1e-4, atol=1e-5)
    assert len(loaded.weights) >= 2


# --- ONNX ------------------------------------------------------------------------------------------------------------


@ONNX
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_what_predict_does(tmp_path, name):
    import onnxruntime

    make, inputs, input_names, output_names = CASES[name]
    model = make()
    model.export(tmp_path / "model.onnx", format="onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    assert [each.name for each in session.get_inputs()] == input_names
    assert [each.name for each in session.get_outputs()] == output_names
    for rows in (1, 5):
        x = inputs(rows)
        found = session.run(None, dict(zip(input_names, jax.tree.leaves(x), strict=True)))
        for one, other in zip(found, expected(model, x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@ONNX
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [models.ResNet18, models.MobileNetV2])
def test_models_of_the_package_are_exported_as_onnx(tmp_path, make):
    import onnxruntime

    x = RNG.normal(size=(2, 32, 32, 3)).astype(np.float32)
    model = built(make(num_classes=3), x)
    model.export(tmp_path / "model.onnx", format="onnx")
    found = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(found[0], expected(model, x)[0], rtol=1e-3, atol=1e-4)


@ONNX
@pytest.mark.slow
def test_a_program_that_computes_something_else_is_not_written(tmp_path):
    import jax2onnx

    convert = jax2onnx.to_onnx
    model = built(nn.Dense(2), X)

    def converts_wrongly(function, specs, **options):
        return convert(lambda *inputs: tuple(1.01 * output + 0.1 for output in function(*inputs)), specs, **options)

    with (mock.patch.object(jax2onnx, "to_onnx", converts_wrongly),
          pytest.raises(ValueError, match=r"computes other numbers: its output 'outputs' differs on 1 random rows")):
        model.export(tmp_path / "model.onnx", format="onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [
    {"window_dimensions": (1, 2, 3, 1), "window_strides": (1, 2, 1, 1), "padding": ((0, 0), (1, 0), (0, 1), (0, 0))},
    {"window_dimensions": (2, 2, 1, 1), "window_strides": (1, 1, 1, 1), "padding": ((0, 0),) * 4},
    {"window_dimensions": (1, 1, 2, 2), "window_strides": (1, 1, 2, 2), "padding": ((0, 0),) * 4},
])
@pytest.mark.parametrize(("start", "combine"), [(-jnp.inf, jax.lax.max), (0.0, jax.lax.add)])
def test_pooling_is_the_same_in_fewer_dimensions(window, start, combine):
    def pool(x):
        return jax.nn.relu(jax.lax.reduce_window(x, start, combine, **window)) + 1

    x = RNG.normal(size=(3, 8, 7, 2)).astype(np.float32)
    program = jax.make_jaxpr(lambda x: jax.jit(pool)(x))(x)
    found = onnx_format._evaluated(program, [x])[0]
    np.testing.assert_allclose(found, pool(x), rtol=1e-6)
    ranks = {equation.invars[0].aval.ndim for equation in jax.make_jaxpr(
        lambda x: onnx_format._evaluated(program, [x]))(x).eqns if equation.primitive.name.startswith("reduce_window")}
    assert ranks == {3}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format_name", "missing", "extra"), [
    ("saved_model", "tensorflow", "tensorflow"), ("onnx", "jax2onnx", "onnx")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, format_name, missing, extra):
    model = built(nn.Dense(2), X)
    with (mock.patch.dict(sys.modules, {missing: None}),
          pytest.raises(ImportError, match=rf"{missing}.*pip install 'trainer-jax\[{extra}\]'")):
        model.export(tmp_path / "model.onnx" if format_name == "onnx" else tmp_path / "model", format=format_name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("path", "options", "error", "words"), [
    ("model", {"format": "saved_mdel"}, ValueError, "Unknown format 'saved_mdel'. Did you mean 'saved_model'"),
    ("model.export", {"format": "onnx"}, ValueError, "`filepath` must end in '.onnx'"),
    ("model.onnx", {"format": "jax"}, ValueError, 'For ONNX, give `format="onnx"`'),
    ("none/model", {"format": "stablehlo"}, FileNotFoundError, "there is no folder"),
    ("model", {"format": "stablehlo", "platforms": ["cpu", "cuda"]}, ValueError, "is for one platform"),
    ("model", {"format": "stablehlo", "platforms": ["cdua"]}, ValueError, "Unknown platform 'cdua'"),
])
def test_what_cannot_be_exported_is_refused(tmp_path, path, options, error, words):
    with pytest.raises(error, match=words):
        built(nn.Dense(2), X).export(tmp_path / path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_counts_rows_needs_a_batch_size_here_too(tmp_path):
    class CountsRows(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x) * (1.0 if x.shape[0] > 2 else 2.0)

    model = built(CountsRows(), X)
    with pytest.raises(ValueError, match=r"cannot be exported for any number of rows.*Pass `batch_size=32`"):
        model.export(tmp_path / "model", format="stablehlo")
    model.export(tmp_path / "model", format="stablehlo", batch_size=4)
    np.testing.assert_allclose(interpreted(tmp_path / "model", X[:4])[0][0], expected(model, X)[0][:4], rtol=1e-5)


def test_every_format_is_documented_and_known():
    assert set(formats.FORMATS) == {"jax", "stablehlo", "saved_model", "onnx"}
    assert all(f'"{name}"' in trainer.Model.export.__doc__ for name in formats.FORMATS)
