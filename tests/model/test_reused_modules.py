"""An NNX object whose arrays lie somewhere already: trained by another model before, restored, or placed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import trainer
from trainer.distribute import FullyShardedStrategy, MirroredStrategy, OneDeviceStrategy

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)


def evaluated(module, strategy, **options):
    with strategy.scope():
        model = trainer.Model(module)
        model.compile("sgd", "mse")
    model.fit(X, X, batch_size=8, shuffle=False, verbose=0, **options)
    return model.evaluate(X, X, batch_size=8, verbose=0)["loss"]


@pytest.mark.slow
def test_one_object_is_trained_under_one_strategy_after_the_other():
    def losses(strategies):
        module = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        return [evaluated(module, strategy) for strategy in strategies]

    devices = jax.devices()
    ways = [OneDeviceStrategy("cpu:0"), MirroredStrategy(devices=devices[:4]),
            FullyShardedStrategy(devices=devices[:2]), MirroredStrategy(devices=devices[2:4]),
            OneDeviceStrategy("cpu:1")]
    np.testing.assert_allclose(losses(ways), losses([ways[0]] * len(ways)), rtol=1e-5)


PLACES = {
    "another device": lambda: jax.devices()[3],
    "another mesh of the devices": lambda: jax.NamedSharding(
        jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2]), jax.P("rows")),
    "more devices": lambda: jax.NamedSharding(jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4]), jax.P()),
}


def placed(place):
    module = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    nnx.update(module, jax.device_put(nnx.state(module), PLACES[place]()))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_an_object_with_arrays_on_devices_is_trained_on_others(place):
    strategy = MirroredStrategy(devices=jax.devices()[:2])
    np.testing.assert_allclose(
        evaluated(placed(place), strategy), evaluated(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), strategy), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("place", PLACES)
def test_functions_on_replicas_take_arrays_and_objects_from_other_devices(place):
    strategy = MirroredStrategy(devices=jax.devices()[:2])
    module, other = placed(place), nnx.Linear(6, 6, rngs=nnx.Rngs(0))

    def run(module, kernel):
        return strategy.reduce("sum", strategy.run(
            lambda module, kernel, x: (module(x) @ kernel).sum(), args=(module, kernel, jnp.ones((4, 6)))))

    np.testing.assert_allclose(run(module, module.kernel.get_value()), run(other, other.kernel.get_value()), rtol=1e-5)
