"""Optimizers of large models in training: on every kind of mesh, and after an interruption."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, optimizers

CPUS = [f"cpu:{index}" for index in range(4)]
STRATEGIES = {
    "mirrored": lambda: distribute.MirroredStrategy(CPUS),
    "fully sharded": lambda: distribute.FullyShardedStrategy(CPUS, min_shard_bytes=0),
    "model parallel": lambda: distribute.ModelParallelStrategy(
        {"replica": 2, "model": 2}, CPUS, {".*/kernel": (None, "model")}),
}
rng = np.random.default_rng(0)
x, y = rng.normal(size=(22, 16)).astype(np.float32), rng.integers(8, size=22)


def new_model(strategy, cls):
    with strategy.scope():
        model = trainer.Model(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)]), seed=0)
        model.compile(cls(0.02), trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fitted(strategy, cls):
    model = new_model(strategy, cls)
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("cls", [optimizers.Adafactor, optimizers.Muon, optimizers.ScheduleFreeAdamW])
def test_the_numbers_are_those_of_one_device(name, cls):
    expected = fitted(distribute.OneDeviceStrategy(), cls)
    for found, one in zip(fitted(STRATEGIES[name](), cls), expected, strict=True):
        np.testing.assert_allclose(found, one, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [optimizers.Adafactor, optimizers.Muon, optimizers.ScheduleFreeAdamW])
def test_a_training_goes_on_where_it_was_saved(cls, tmp_path):
    whole = new_model(distribute.OneDeviceStrategy(), cls)
    whole.fit(x, y, batch_size=8, epochs=4, verbose=0)
    half = new_model(distribute.OneDeviceStrategy(), cls)
    half.fit(x, y, batch_size=8, epochs=2, verbose=0)
    half.save(tmp_path / "half")
    resumed = trainer.load(tmp_path / "half", new_model(distribute.OneDeviceStrategy(), cls))
    resumed.fit(x, y, batch_size=8, epochs=4, initial_epoch=2, verbose=0)
    for found, one in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(found, one)


def test_excluded_layers_have_adamw():
    def moments(**options):
        state = optimizers.Muon(**options).init({
            "up": {"kernel": np.zeros((4, 8))}, "embed": {"embedding": np.zeros((5, 4))}})
        return sum(leaf.size for leaf in jax.tree.leaves(state.inner)) - 1  # less Adam's count

    assert moments() == 32 + 2 * 20
    assert moments(exclude_embeddings=False) == 32 + 20
    assert moments(exclude_layers=["up/"]) == 2 * 32 + 2 * 20

