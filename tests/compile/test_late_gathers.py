"""Steps that gather split parameters again for each use: the same numbers, with few whole arrays at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from tests.support.hlo import collectives
from trainer import distribute
from trainer.core.compile.traces import late_gathers
from trainer.engine.model.core.model_core import core_of
from trainer.tools.plan.program_contents import peak_bytes

rng = np.random.default_rng(0)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(16, 8)
        return embed.attend(nn.Dense(8)(embed(x).mean(1)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))), None


class Scanned(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(16)(stack()(x, None)[0])


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.RNN(nn.LSTMCell(8))(x)[:, -1])


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.BatchNorm(use_running_average=not training)(nn.Conv(8, (3, 3))(x))
        return nn.Dense(16)(nn.relu(x).reshape(x.shape[0], -1))


def floats(*shape):
    return lambda: rng.normal(size=(32, *shape)).astype(np.float32)


MODELS = {
    "dense": (lambda: nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)]), floats(8)),
    "nnx": (lambda: nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 16, rngs=nnx.Rngs(0))),
            floats(8)),
    "conv": (Conv, floats(4, 4, 2)),
    "recurrent": (Recurrent, floats(5, 8)),
    "scanned": (Scanned, floats(8)),
    "scanned and rematerialised": (lambda: Scanned(remat=True), floats(8)),
    "tied": (Tied, lambda: rng.integers(16, size=(32, 4))),
}


def fitted(kind, strategy, **options):
    make, inputs = MODELS[kind]
    with strategy.scope():
        model = trainer.Model(make(), seed=0)
        model.compile(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
                      trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **options)
    rng.bit_generator.state = np.random.default_rng(1).bit_generator.state
    x, y = inputs(), rng.integers(16, size=32)
    history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    return (history.history, model.get_weights(), model.evaluate(x, y, batch_size=12, verbose=0),
            model.predict(x, batch_size=12, verbose=0))


def assert_close(found, expected):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), found, expected)


def sharded():
    return distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(4)], min_shard_bytes=0)


def on_a_mesh(kind):
    layouts = {"layers_0/kernel": (None, "model")} if kind == "dense" else {
        "^Dense_0/kernel": (None, "model"), ".*/Dense_0/kernel": (None, None, "model"),
        ".*/Dense_1/kernel": (None, "model")}
    return distribute.ModelParallelStrategy(
        {"replica": 2, "shard": 2, "model": 2}, [f"cpu:{index}" for index in range(8)], layouts, min_shard_bytes=0)


@pytest.fixture
def late(monkeypatch):
    """Puts off the gathering of small arrays too, and counts what is gathered where it is used."""
    made, uses = late_gathers._Rewriter.whole, []

    def whole(self, value):
        uses.extend([1] * isinstance(value, late_gathers._Late))
        return made(self, value)

    monkeypatch.setattr(late_gathers, "LEAST_BYTES", 0)
    monkeypatch.setattr(late_gathers._Rewriter, "whole", whole)
    return uses


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_numbers_are_those_of_one_device(kind, late):
    found = fitted(kind, sharded())
    assert late
    assert_close(found, fitted(kind, distribute.OneDeviceStrategy()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "scanned", "scanned and rematerialised"])
def test_on_a_mesh_with_other_axes_the_numbers_are_those_of_one_device(kind, late):
    found = fitted(kind, on_a_mesh(kind))
    assert late
    assert_close(found, fitted(kind, distribute.OneDeviceStrategy()))


@pytest.mark.slow
def test_the_bits_are_those_of_a_step_that_gathers_all_at_once(late, monkeypatch):
    found = fitted("scanned", sharded())
    assert late
    monkeypatch.setattr(late_gathers, "LEAST_BYTES", 2**60)
    jax.tree.map(np.testing.assert_array_equal, found, fitted("scanned", sharded()))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"remat": True}, {"ema_decay": 0.9}])
def test_the_numbers_are_those_of_one_device_with_options(options, late):
    found = fitted("dense", sharded(), **options)
    assert late
    assert_close(found, fitted("dense", distribute.OneDeviceStrategy(), **options))


@pytest.mark.slow
def test_mixed_precision_gathers_float32_and_casts_after(late):
    found = fitted("scanned", sharded(), precision="mixed_bfloat16")
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0.05, atol=0.01), found[0], fitted(
        "scanned", distribute.OneDeviceStrategy(), precision="mixed_bfloat16")[0])


@pytest.mark.slow
def test_a_step_that_reads_parameters_after_their_update_gets_them():
    class Model(trainer.Model):
        def train_step(self, state, batch):
            def loss_fn(params):
                outputs, model_state = self.apply(params, state, batch[0], training=True)
                norm = sum(jnp.sum(leaf ** 2) for leaf in jax.tree.leaves(params))  # of parameters alone
                return jnp.mean(outputs ** 2) + 0.01 * norm, model_state

            (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            state = state.apply_gradients(grads, model_state=model_state)
            return {"loss": loss, "after": sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(state.params))}, state

    def run(strategy):
        with strategy.scope():
            model = Model(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16)]), seed=0)
            model.compile("adam")
        x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
        return model.fit(x, x, batch_size=8, epochs=2, verbose=0).history, model.get_weights()

    assert_close(run(sharded()), run(distribute.OneDeviceStrategy()))


class Blocks(nn.Module):
    layers: int = 24

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(256)(x)
        for _ in range(self.layers):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(h)
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return nn.Dense(4)(x)


@pytest.mark.exhaustive  # a minute
@pytest.mark.slow
def test_a_step_of_24_layers_never_has_more_than_three_of_them_whole(monkeypatch):
    monkeypatch.setattr(late_gathers, "LEAST_BYTES", 2**16)
    strategy = distribute.FullyShardedStrategy([f"cpu:{index}" for index in range(8)])
    with strategy.scope():
        model = trainer.Model(Blocks(), seed=0)
        model.compile("adam", "mse", steps_per_execution=1)
    x = rng.normal(size=(8, 16, 32)).astype(np.float32)
    expected = strategy.explain(model, batch=(x, x[..., :4])).peak_bytes
    model.build(x[:1])
    phase = core_of(model).prepared_phase("train", (x, x[..., :4]))
    compiled = phase.lowered((x, x[..., :4])).compile()
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state.params))
    gradients, layer = params / 8, params / 24
    activations = 24 * 16 * 256 * 4 * 20  # one row a device: some 20 arrays of 256 features, or as many, in each layer
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert expected == pytest.approx(peak_bytes(compiled), rel=0.15)
    assert temporary < gradients + 3 * layer + activations < params
    gathered = [found for found in collectives(compiled.as_text()) if found.kind == "all-gather"]
    assert len(gathered) > 1.5 * len([leaf for leaf in jax.tree.leaves(model.state.params) if leaf.nbytes >= 2**16])
