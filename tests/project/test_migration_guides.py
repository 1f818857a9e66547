"""docs/migration is true: the guides' blocks run, and the names of their tables exist; Keras's too."""

from __future__ import annotations

import inspect
import re

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
import trainer.estimator
from tests.support import pages, project_files

GUIDES = sorted(str(path.relative_to(project_files.ROOT)) for path in project_files.ROOT.glob("docs/migration/*.md"))
KERAS_GUIDE = "docs/migration/from_keras3_jax.md"
ROOTS = {"trainer": trainer, "callbacks": trainer.callbacks, "Model": trainer.Model, "optax": optax, "jax": jax,
         "nn": nn, "nnx": nnx, "est": trainer.estimator,
         **{name: getattr(trainer.Model, name) for name in ("compile", "fit", "evaluate", "predict", "train_on_batch")}}


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        return pytest.importorskip("keras")


def resolved(name, roots):
    """Returns what a dotted name stands for; an AttributeError or KeyError says that there is no such thing."""
    root, *parts = name.split(".")
    found = roots[root]
    for part in parts:
        found = getattr(found, part)
    return found


def names_in(cell):
    """Returns the names of a table's cell, each with the keywords that it is called with."""
    spans = re.findall(r"`([^`]+)`", cell)
    calls = [re.fullmatch(r"([A-Za-z_][\w.]*)(?:\((.*)\))?", span) for span in spans]
    return [(call[1], re.findall(r"(\w+)=", re.sub(r"\{.*?\}", "", call[2] or ""))) for call in calls if call]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_runs_from_its_beginning_to_its_end(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run(guide)


@pytest.mark.parametrize("guide", GUIDES)
def test_code_of_other_libraries_is_python(guide):
    blocks = pages.blocks(guide, "py")
    assert blocks
    for block in blocks:
        compile(block, guide, "exec")


@pytest.mark.parametrize("guide", GUIDES)
def test_what_a_table_names_is_here_and_takes_the_keywords(guide):
    checked = 0
    for row in pages.rows_of_tables(guide):
        if row[0].startswith("`layers.") or row[0].startswith("`activation="):
            continue  # of Flax's layers, see below
        assert len(row) in (2, 3) and row[1], row
        for name, keywords in names_in(row[1]):
            parameters = inspect.signature(resolved(name, ROOTS)).parameters if keywords else {}
            assert set(keywords) <= set(parameters), row
            checked += 1
    assert checked > 15


@pytest.mark.parametrize("guide", [KERAS_GUIDE, "docs/migration/from_tf_keras.md"])
def test_what_a_table_says_of_keras_is_there(guide, keras):
    old = {"SyncBatchNormalization", "LossScaleOptimizer", "Sequence", "set_global_policy"}  # tf.keras's own
    names = [name.removeprefix("tf.") for row in pages.rows_of_tables(guide) for name, _ in names_in(row[0])]
    names = [name for name in names if name.startswith("keras.") and name.rpartition(".")[2] not in old]
    assert len(names) > 15
    for name in names:
        resolved(name, {"keras": keras})


@pytest.mark.slow
def test_defaults_of_layers_are_those_of_the_table(keras):
    def default(layer, argument):
        return inspect.signature(layer).parameters[argument].default

    layers = keras.layers
    assert default(layers.Dense, "kernel_initializer") == "glorot_uniform"
    assert default(layers.Conv2D, "padding") == "valid" and nn.Conv(8, (3, 3)).padding == "SAME"
    assert (default(layers.BatchNormalization, "epsilon"), nn.BatchNorm().epsilon) == (1e-3, 1e-5)
    assert default(layers.BatchNormalization, "momentum") == nn.BatchNorm().momentum == 0.99
    assert (default(layers.LayerNormalization, "epsilon"), nn.LayerNorm().epsilon) == (1e-3, 1e-6)
    assert default(layers.Embedding, "embeddings_initializer") == "uniform"
    assert (default(keras.activations.gelu, "approximate"), default(nn.gelu, "approximate")) == (False, True)
    assert nn.max_pool(np.ones((1, 4, 4, 1)), (2, 2)).shape == (1, 3, 3, 1)
    assert (default(keras.optimizers.Adam, "epsilon"), default(optax.adam, "eps")) == (1e-7, 1e-8)
    kernel = nn.Dense(64).init(jax.random.key(0), np.ones((1, 256)))["params"]["kernel"]
    assert kernel.std() == pytest.approx(1 / 16, rel=0.05), "LeCun's"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # in Keras, with JAX 0.12
def test_keras_and_the_trainer_have_the_same_numbers(keras, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    make, train, step = pages.blocks(KERAS_GUIDE, "py")
    our_make, our_train, carry, *_ = pages.blocks(KERAS_GUIDE)
    theirs, ours = ({"__name__": "__main__"} for _ in range(2))
    exec(make, theirs)
    exec(our_make, ours)
    carry = re.sub(r"^weights = .*$", "", carry, flags=re.MULTILINE)
    exec(carry, ours | {"weights": theirs["model"].get_weights()})
    exec(train.replace("epochs=5", "epochs=5, shuffle=False"), theirs)
    exec(our_train.replace("epochs=5", "epochs=5, shuffle=False"), ours)
    expected, received = theirs["history"].history, ours["history"].history
    assert set(expected) == set(received) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in expected.items():
        np.testing.assert_allclose(received[name], values, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose([ours["loss"], ours["accuracy"]], [theirs["loss"], theirs["accuracy"]], rtol=1e-4)
    np.testing.assert_allclose(ours["logits"], theirs["logits"], rtol=1e-3, atol=1e-4)
    # The step of one's own of the other library trains as well.
    exec(step, theirs | {"jax": jax})


def test_uneven_batches_are_refused_by_keras(keras, devices):
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"]))
    try:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="partitioned 4 times"):
            model.fit(np.ones((6, 3)), np.ones((6, 1)), verbose=0)
    finally:
        keras.distribution.set_distribution(None)


def test_the_readme_lists_every_guide():
    assert set(GUIDES) <= set(re.findall(r"\]\((docs/migration/\w+\.md)\)", pages.read("README.md")))
