"""Inputs keep their values under a dtype policy, or are refused by name."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.core.test_precision import operand_dtypes
from tests.support.networks import mirrored

IDS = np.arange(1900, 2000, dtype=np.float32)[:, None]
SEVENTHS = np.arange(2001, dtype=np.float32)[:, None] % 7  # exact in 16 bits
BF16 = jnp.dtype(jnp.bfloat16)


class Embedding(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Embed(2001, 1, embedding_init=lambda *_: jnp.asarray(SEVENTHS))(ids[:, 0].astype(jnp.int32))


class OwnTable(nn.Module):
    """A module without layers."""

    @nn.compact
    def __call__(self, ids):
        return self.param("table", lambda _: jnp.asarray(SEVENTHS))[jnp.round(ids[:, 0]).astype(jnp.int32)]


class NNXEmbedding(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(2001, 1, embedding_init=lambda *_: jnp.asarray(SEVENTHS), rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.embed(ids[:, 0].astype(jnp.int32))


class Clock(nn.Module):
    """Seconds since 1970, of which the day's are a feature of a layer."""

    @nn.compact
    def __call__(self, seconds):
        return nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)(seconds % 7)


class Named(nn.Module):
    @nn.compact
    def __call__(self, ids, image):
        return Embedding()(ids) + 0 * nn.Dense(1)(image)


def compiled(module, precision="mixed_bfloat16"):
    model = trainer.Model(module, seed=0)
    model.compile(optax.sgd(0.0), "mse", precision=precision)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("make", [Embedding, OwnTable, NNXEmbedding, Clock, lambda: lambda ids: ids % 7])
def test_whole_numbers_that_a_module_computes_with_keep_their_values(make, precision):
    model = compiled(make(), precision)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), IDS % 7)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_inputs_keep_their_values_in_every_phase_and_kind_of_data(replicas):
    with mirrored(replicas).scope():
        model = compiled(Named())
    image = np.random.default_rng(0).uniform(0, 255, (100, 4)).astype(np.float32)
    x, y = {"ids": IDS, "image": image}, IDS % 7
    dataset = trainer.data.Dataset.from_arrays((x, y)).batch(50)
    histories = [model.fit(*data, verbose=0, batch_size=size, epochs=2).history["loss"] for data, size in (
        ((x, y), 50), ((dataset,), None), (([(x, y), (x, y)],), None))]
    assert histories == [[0.0, 0.0]] * 3
    assert model.evaluate(x, y, verbose=0)["loss"] == 0
    assert model.train_on_batch(x, y) == model.test_on_batch(x, y) == 0
    np.testing.assert_array_equal(model.predict_on_batch(x), y)
    np.testing.assert_array_equal(model(x), y)


class Weights(nn.Module):
    """Products with weights of its own."""

    @nn.compact
    def __call__(self, x):
        return x.reshape(len(x), -1) @ self.param("kernel", nn.initializers.ones, (4, 2))


class OwnNNX(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((4, 2)))

    def __call__(self, x):
        return x @ self.kernel[...]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [Weights, OwnNNX, lambda: nn.Dense(2)])
def test_products_are_computed_in_the_compute_dtype(make):
    model = compiled(make())
    x = np.ones((3, 4), np.float32)
    model.build(x)
    state = model.state
    assert operand_dtypes(lambda params: model.apply(params, state, x)[0], state.params) == {BF16}


LARGE = np.full((8, 4), 1e5, np.float32)


class Keyed(nn.Module):
    @nn.compact
    def __call__(self, a):
        return nn.Dense(2)(a)


class Steps(trainer.Model):
    """A train step of one's own, which scales the inputs."""

    def train_step(self, state, batch):
        x, *rest = batch
        return super().train_step(state, (x / 1e5, *rest))


@pytest.mark.sampled
@pytest.mark.parametrize("run", [
    lambda model, x, y: model.fit(x, y, verbose=0),
    lambda model, x, y: model.fit(trainer.data.Dataset.from_arrays((x, y)).batch(4), epochs=2, verbose=0),
    lambda model, x, y: model.fit(iter([(x, y)]), verbose=0),
    lambda model, x, y: model.evaluate(x, y, verbose=0),
    lambda model, x, y: model.predict(x, verbose=0),
    lambda model, x, y: model.predict(iter([{"a": x["a"][:4]}, {"a": x["a"][4:]}]), verbose=0),
    lambda model, x, y: model.train_on_batch(x, y),
    lambda model, x, y: model.test_on_batch(x, y),
    lambda model, x, y: model.predict_on_batch(x),
], ids=["fit", "Dataset", "iterator", "evaluate", "predict", "batches", "train_on_batch", "test_on_batch",
        "predict_on_batch"])
def test_inputs_that_would_become_infinite_are_refused_by_name(run):
    x = LARGE.copy()
    x[:-1] = 1  # the first batch and the first rows are fine
    with pytest.raises(ValueError, match=r"`x\['a'\]` must fit into float16.* magnitudes up to 65504.* magnitude of "
                                         r"100000, .* Scale the inputs, or use precision=\"mixed_bfloat16\""):
        run(compiled(Keyed(), "mixed_float16"), {"a": x}, x[:, :2])


@pytest.mark.sampled
@pytest.mark.parametrize(("module", "precision", "x"), [
    (lambda: nn.Dense(2), "mixed_bfloat16", LARGE),
    (lambda: nn.Dense(2), "mixed_float16", np.full((8, 4), 255, np.uint8)),
    (lambda: nn.Dense(2), "mixed_float16", np.full((8, 4), 1234.5678, np.float32)),
    (lambda: nn.Sequential([lambda x: x / 1e5, nn.Dense(2)]), "mixed_float16", LARGE),
    (lambda: nn.Sequential([nn.LayerNorm(), nn.Dense(2)]), "mixed_float16", LARGE + np.arange(4, dtype=np.float32)),
    (lambda: nn.Sequential([nn.Embed(100_001, 2), lambda x: x.mean(1)]), "mixed_float16", LARGE.astype(np.int32)),
], ids=["bfloat16", "pixels", "features", "scaled", "normalized", "ids"])
def test_what_fits_is_not_refused(module, precision, x):
    model = compiled(module(), precision)
    assert np.isfinite(model.fit(x, np.zeros((8, 2), np.float32), verbose=0).history["loss"]).all()
    assert np.isfinite(model.predict(x, verbose=0)).all()


@pytest.mark.slow
def test_a_train_step_that_scales_its_inputs_is_not_refused():
    model = Steps(nn.Dense(2), seed=0)
    model.compile(optax.sgd(0.0), "mse", precision="mixed_float16")
    assert np.isfinite(model.fit(LARGE, LARGE[:, :2] / 1e5, verbose=0).history["loss"]).all()
    with pytest.raises(trainer.data.DataError, match="must fit into float16"):
        model.predict(LARGE, verbose=0)


class Complex(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.abs(self.dense(x))


class LinenComplex(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.abs(nn.Dense(2)(x))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("make", [LinenComplex, Complex])
def test_complex_inputs_stay_complex(make):
    x = (LARGE / 1e5 * (1 + 2j)).astype(np.complex64)
    expected = compiled(make(), None).predict(x, verbose=0)
    for precision in ("mixed_bfloat16", "mixed_float16"):
        np.testing.assert_allclose(compiled(make(), precision).predict(x, verbose=0), expected, rtol=2e-2)
        assert not np.allclose(compiled(make(), precision).predict(x.real.copy(), verbose=0), expected, rtol=0.2)
