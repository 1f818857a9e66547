"""docs/utilities.md is true: its blocks run, and its initializers and constraints are Keras's."""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import pages
from trainer import datasets, utils

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")

PAGE = "docs/utilities.md"
ROWS = {row[0]: row for row in pages.rows_of_tables(PAGE)}
INITIALIZERS = [row[:2] for row in ROWS.values() if not row[0].startswith("`nn.") and any(
    word in row[1] for word in ("initializers.", "jax.random", "jnp.eye"))]
CONSTRAINTS = [row[:2] for row in ROWS.values() if "constrained(" in row[1]]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        patched.chdir(tmp_path_factory.mktemp("page"))
        yield pages.run(PAGE)
    utils.set_random_seed(0)


@pytest.mark.slow
def test_the_page_runs_from_its_beginning_to_its_end(names):
    assert (len(names["train"]), len(names["validation"])) == (1293, 144)
    assert names["history"].history["val_loss"][0] < 2.5
    assert len(pages.blocks(PAGE)) == pages.read(PAGE).count("```python") == 4


def test_every_utility_and_data_set_is_on_the_page():
    text = pages.read(PAGE)
    exported = {name for name in utils.__all__ if name not in ("datasets", "is_interactive_logging_enabled",
                                                               "pack_x_y_sample_weight", "unpack_x_y_sample_weight",
                                                               "disable_interactive_logging")}
    assert {name for name in exported if f"`{name}" not in text and f".{name}" not in text} == set()
    assert {name for name in datasets.__all__ if f"`{name}`" not in text} == set()


def test_all_of_keras_is_in_the_tables():
    initializers = {name for name, value in vars(keras.initializers).items() if isinstance(value, type)
                    and issubclass(value, keras.initializers.Initializer) and name == value.__name__}
    assert initializers - {cell.partition("(")[0] for row in INITIALIZERS for cell in code(row[0])} == {
        "Initializer", "STFT"}
    constraints = {name for name, value in vars(keras.constraints).items() if isinstance(value, type)
                   and name == value.__name__}
    assert constraints - {cell.partition("(")[0] for row in CONSTRAINTS for cell in code(row[0])} == {"Constraint"}


def sample(initializer, shape, is_keras):
    drawn = initializer(shape) if is_keras else initializer(jax.random.key(3), shape)
    return np.asarray(drawn, np.float64)


@pytest.mark.parametrize("shape", [
    (300, 200), pytest.param((200, 300), marks=pytest.mark.slow), (3, 3, 40, 60)])
@pytest.mark.parametrize(("ours", "theirs"), [(code(row[1])[0], code(row[0])[0]) for row in INITIALIZERS])
@pytest.mark.sampled(5)
def test_an_initializer_has_kerass_distribution(ours, theirs, shape):
    if theirs.startswith("Identity") and len(shape) > 2:
        return
    # A seed, as a draw of Keras's is another in each process otherwise.
    random_kinds = ("Random", "Truncated", "Variance", "Glorot", "He", "Lecun", "Orthogonal")
    theirs = theirs[:-1] + (", seed=1)" if "(" in theirs and not theirs.endswith("()") else "seed=1)") if (
        theirs.startswith(random_kinds)) else theirs
    expected = sample(eval(f"keras.initializers.{theirs}", {"keras": keras}), shape, True)
    found = sample(eval(ours, {"nn": nn, "jax": jax, "jnp": jnp}), shape, False)
    assert found.shape == expected.shape
    if theirs.startswith("Orthogonal"):
        flat, flat_expected = found.reshape(-1, shape[-1]), expected.reshape(-1, shape[-1])
        products = [one.T @ one if len(one) >= one.shape[1] else one @ one.T for one in (flat, flat_expected)]
        np.testing.assert_allclose(products[0], products[1], atol=1e-4)
        return
    count = found.size
    assert found.std() == pytest.approx(expected.std(), rel=5 / np.sqrt(count), abs=1e-12)
    assert found.mean() == pytest.approx(expected.mean(), abs=8 * expected.std() / np.sqrt(count) + 1e-12)
    # Of each distribution, the tails too.
    quantiles = np.linspace(0, 1, 21)[1:-1]
    np.testing.assert_allclose(np.quantile(found, quantiles), np.quantile(expected, quantiles),
                               atol=0.03 * expected.std() + 1e-12)
    if "Uniform" in theirs or "runcated" in theirs.replace("untruncated", "") or "Normal" in theirs[6:]:
        assert abs(found).max() == pytest.approx(abs(expected).max(), rel=0.02 if "RandomNormal" not in theirs else 0.5)


@pytest.mark.parametrize("name", ["glorot_uniform", "he_normal", "orthogonal", "variance_scaling", "normal"])
def test_nnx_has_the_same_initializers(name):
    assert getattr(nnx.initializers, name) is getattr(nn.initializers, name)


@pytest.mark.slow
def test_defaults_of_layers_are_those_of_the_page():
    kernel = nn.Dense(300).init(jax.random.key(0), jnp.ones((1, 200)))["params"]["kernel"]
    assert kernel.std() == pytest.approx(200**-0.5, rel=0.02)
    embedding = nn.Embed(200, 300).init(jax.random.key(0), jnp.zeros(1, int))["params"]["embedding"]
    assert embedding.std() == pytest.approx(300**-0.5, rel=0.02)
    assert isinstance(keras.layers.Dense(1).kernel_initializer, keras.initializers.GlorotUniform)
    assert isinstance(keras.layers.Conv2D(1, 1).kernel_initializer, keras.initializers.GlorotUniform)
    uniform = keras.layers.Embedding(1, 1).embeddings_initializer
    assert (type(uniform), uniform.minval, uniform.maxval) == (keras.initializers.RandomUniform, -0.05, 0.05)
    lstm = keras.layers.LSTM(1).cell
    assert isinstance(lstm.kernel_initializer, keras.initializers.GlorotUniform)
    assert isinstance(lstm.recurrent_initializer, keras.initializers.Orthogonal)


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), [(code(row[0])[0], each) for row in CONSTRAINTS for each in code(row[1])])
def test_a_constraint_gives_kerass_numbers(theirs, ours, names):
    random = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(random.normal(size=(6, 5)) * 2, jnp.float32), "bias": jnp.ones(5)}
    if "NonNeg" in theirs:
        params = jax.tree.map(jnp.abs, params)
    updates = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), params)
    transformation = optax.chain(optax.identity(), eval(ours, {"optax": optax, **names}))
    changed, _ = transformation.update(updates, transformation.init(params), params)
    found = optax.apply_updates(params, changed)
    constraint = eval(f"keras.constraints.{theirs}", {"keras": keras})
    moved = optax.apply_updates(params, updates)
    np.testing.assert_allclose(found["kernel"], constraint(moved["kernel"]), atol=2e-6)
    if "constrained" in ours:
        np.testing.assert_array_equal(found["bias"], moved["bias"])


def test_every_link_leads_to_a_file():
    assert all(path.exists() for path in pages.linked_files(PAGE))
