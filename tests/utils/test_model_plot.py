"""Pictures of models: which layers and arrows there are for each kind of module, and what Graphviz is given."""

import html
import os
import re
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer import utils
from trainer.utils import model_plot as module


def x(rows=4, size=3):
    return np.zeros((rows, size), np.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(x.shape[-1])(x))
        return nn.relu(x + nn.Dense(x.shape[-1])(y))


class Net(nn.Module):
    @nn.compact
    def __call__(self, images, words, train=False):
        joined = nn.Dense(8)(images) + nn.Embed(10, 8)(words).mean(1)
        return nn.Dense(2, name="head")(nn.Dropout(0.5, deterministic=not train)(Block(name="block")(joined, train)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.inner = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x):
        x = self.first(x)
        return x + self.inner(x) * jax.lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0)


class Shared(nn.Module):
    @nn.compact
    def __call__(self, left, right):
        twin = nn.Dense(4, name="twin")
        return nn.Dense(1, name="head")(jnp.abs(twin(left) - twin(right)))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="head")(nn.RNN(nn.SimpleCell(4), name="rnn")(x[:, None]))


class Pair(trainer.Model):
    def sample_inputs(self, x):
        return {"g": x, "d": x}


def built(model, *inputs):
    model.build(inputs if len(inputs) > 1 else inputs[0])
    return model


MODELS = {
    "Linen": lambda: built(trainer.Model(Net()), x(), np.zeros((4, 5), np.int32)),
    "NNX": lambda: built(trainer.Model(NNXNet(nnx.Rngs(0))), x()),
    "Sequential": lambda: built(trainer.Sequential([nn.Dense(4), nn.relu, Block()]), x()),
    "one layer": lambda: built(trainer.Model(nn.Dense(2)), x()),
    "shared layer": lambda: built(trainer.Model(Shared()), x(), x()),
    "recurrent": lambda: built(trainer.Model(Recurrent()), x()),
    "several modules": lambda: built(Pair({"g": [nn.Dense(3), nn.tanh], "d": [nn.Dense(1)]}), x()),
}
IMAGES, WORDS = "input/0", "input/1"
EDGES = {
    ("Linen", False): ["input/0 Dense_0", "input/1 Embed_0", "Dense_0 block", "Embed_0 block", "block Dropout_0",
                       "Dropout_0 head"],
    ("Linen", True): ["input/0 Dense_0", "input/1 Embed_0", "Dense_0 block/Dense_0", "Embed_0 block/Dense_0",
                      "block/Dense_0 block/BatchNorm_0", "block/BatchNorm_0 block/Dense_1", "Dense_0 Dropout_0",
                      "Embed_0 Dropout_0", "block/Dense_1 Dropout_0", "Dropout_0 head"],
    ("NNX", False): ["input/0 first", "first inner"],
    ("NNX", True): ["input/0 first", "first inner/layers/0", "inner/layers/0 inner/layers/2"],
    ("Sequential", False): ["input/0 layers_0", "layers_0 layers_2"],
    ("one layer", False): ["input/0 Dense"], ("one layer", True): ["input/0 Dense"],
    ("shared layer", False): ["input/0 twin", "input/1 twin", "twin head"],
    ("recurrent", False): ["input/0 rnn", "rnn head"],
    ("recurrent", True): ["input/0 rnn/cell/i", "rnn/cell/i rnn/cell/h", "rnn/cell/h head", "rnn/cell/i head"],
    ("several modules", False): ["g/input/0 g/layers_0", "d/input/0 d/layers_0"],
}


def boxes(text):
    """Returns the rows of each box by its number."""
    return {number: [html.unescape(row) for row in re.findall(r"<td[^>]*>(?:<font[^>]*><b>)?(.*?)(?:</b></font>)?</td>",
                                                              label)]
            for number, label in re.findall(r"^(n\d+) \[label=(.*)\];$", text, re.MULTILINE)}


def edges(text):
    names = {number: rows[0].partition(" (")[0] for number, rows in boxes(text).items()}
    return [f"{names[one]} {names[other]}" for one, other in re.findall(r"^(n\d+) -> (n\d+);$", text, re.MULTILINE)]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "nested"), EDGES)
def test_arrows_are_what_flows_between_layers(name, nested):
    model = MODELS[name]()
    found = edges(utils.model_to_dot(model, show_layer_names=True, expand_nested=nested))
    expected = [edge.replace("rnn/cell", "SimpleCell_0") for edge in EDGES[name, nested]]
    assert sorted(found) == sorted(expected)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_a_picture_leaves_the_model_as_it_was(name):
    model = MODELS[name]()
    before = model.get_weights()
    utils.model_to_dot(model)
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))


def test_boxes_say_what_was_asked_for():
    model = MODELS["Linen"]()
    model.compile("sgd", "mse", freeze="head")
    plain = [rows for _, rows in sorted(boxes(utils.model_to_dot(model)).items())]
    assert plain[:4] == [["Input"], ["Input"], ["Dense"], ["Embed"]]
    shown = {rows[0]: rows[1:] for rows in boxes(utils.model_to_dot(
        model, show_shapes=True, show_dtype=True, show_layer_names=True, show_trainable=True)).values()}
    assert shown["input/1 (Input)"] == ["Output shape: (None, 5)", "Output dtype: int32"]
    assert shown["Embed_0 (Embed)"] == ["Input shape: (None, 5)", "Output shape: (None, 5, 8)",
                                        "Output dtype: float32", "Trainable: T"]
    assert shown["head (Dense)"][-1] == "Trainable: NT" and shown["block (Block)"][-1] == "Trainable: T"
    assert len(shown["Dropout_0 (Dropout)"]) == 3  # it has no parameters
    model.compile("sgd", "mse", freeze="block/Dense_0")
    assert "Trainable: T/NT" in boxes(utils.model_to_dot(model, show_trainable=True))["n4"]


def test_layers_that_call_others_are_frames():
    text = utils.model_to_dot(MODELS["Linen"](), show_layer_names=True, expand_nested=True)
    frame = re.search(r'^subgraph "cluster_block" \{$(.*?)^\}$', text, re.MULTILINE | re.DOTALL)[1]
    assert [rows[0] for rows in boxes(frame).values()] == [
        "block/Dense_0 (Dense)", "block/BatchNorm_0 (BatchNorm)", "block/Dense_1 (Dense)"]


def test_the_text_has_the_direction_the_resolution_and_escaped_names():
    model = built(trainer.Model(nn.Dense(2, name="<&>"), name='a "model"'), x())
    text = utils.model_to_dot(model, rankdir="LR", dpi=72, show_layer_names=True)
    assert text.startswith('digraph "a \\"model\\"" {\ngraph [rankdir=LR, dpi=72')
    assert "<&>" not in text


def test_a_dot_file_needs_no_program(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = MODELS["Sequential"]()
    assert utils.plot_model(model, tmp_path / "new" / "model.dot", show_shapes=True) is None
    assert (tmp_path / "new" / "model.dot").read_text() == utils.model_to_dot(model, show_shapes=True)
    with pytest.raises(ImportError, match=r"apt install graphviz.*model\.dot"):
        utils.plot_model(model, tmp_path / "model.png")
    assert not (tmp_path / "model.png").exists()


@pytest.fixture
def dot(tmp_path, monkeypatch):
    """A program in the place of Graphviz's, that returns what it is given."""
    program = tmp_path / "bin" / "dot"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\ncat\n[ "$1" != "-Tpdf" ] || { echo "no fonts" >&2; exit 3; }\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(shutil, "which", lambda name: str(program) if name == "dot" else None)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.usefixtures("dot")
@pytest.mark.parametrize("kind", ["png", "svg", "jpg"])
def test_graphviz_is_given_the_text(kind, tmp_path):
    model = MODELS["Sequential"]()
    utils.plot_model(model, str(tmp_path / f"model.{kind}"))
    assert (tmp_path / f"model.{kind}").read_text() == f"-T{kind}\n{utils.model_to_dot(model)}"


@pytest.mark.usefixtures("dot")
def test_what_graphviz_says_is_passed_on(tmp_path):
    with pytest.raises(RuntimeError, match="Graphviz failed with exit code 3: no fonts"):
        utils.plot_model(MODELS["Sequential"](), tmp_path / "model.pdf")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_graphviz_draws_every_kind_of_model(kind, begin, tmp_path):
    for number, (name, make) in enumerate(MODELS.items()):
        for nested in (False, True):
            path = tmp_path / f"{number}{nested}.{kind}"
            utils.plot_model(make(), path, True, True, True, expand_nested=nested, show_trainable=True, dpi=50)
            assert path.read_bytes().startswith(begin), name


def test_a_notebook_shows_the_picture(tmp_path, monkeypatch):
    class Display:
        @staticmethod
        def Image(filename):
            return ("image", filename)

    class IPython:
        display = Display

    monkeypatch.setattr(module, "is_in_notebook", lambda: True)
    monkeypatch.setattr(module, "_rendered", lambda text, kind: b"picture")
    monkeypatch.setitem(module.sys.modules, "IPython", IPython)
    path = os.fspath(tmp_path / "model.png")
    assert utils.plot_model(MODELS["one layer"](), path) == ("image", path)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"to_file": "model.gif"}, ValueError, "`to_file` must be a path that ends with .png, .svg"),
    ({"to_file": "model.bmp"}, ValueError, "Received: to_file='model.bmp'."),
    ({"to_file": ""}, ValueError, "`to_file` must be"),
    ({"rankdir": "left"}, ValueError, "`rankdir` must be one of 'TB'"),
    ({"dpi": 0}, ValueError, "`dpi` must be"),
    ({"show_shapes": "yes"}, TypeError, "`show_shapes` must be True or False"),
])
def test_bad_arguments_are_named(arguments, error, message, tmp_path):
    with pytest.raises(error, match=re.escape(message)):
        utils.plot_model(MODELS["one layer"](), **({"to_file": tmp_path / "x.dot"} | arguments))


def test_a_model_must_be_a_built_one():
    with pytest.raises(TypeError, match=r"`model` must be a `trainer\.Model`"):
        utils.model_to_dot(nn.Dense(1))
    with pytest.raises(RuntimeError, match="build"):
        utils.model_to_dot(trainer.Model(nn.Dense(1)))
