"""The state of replicas: one way through a step, and one rule for model state, under `fit` and `strategy.run`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, custom_step, logits_loss, mirrored

REPLICAS = 3  # no power of two: the mean of three equal numbers may differ from them in the last bit


def built(seed=1, module=None, optimizer=None, **options):
    strategy = mirrored(REPLICAS)
    with strategy.scope():
        model = trainer.Model(module or LinenMLP(batch_norm=True), seed=seed)
        model.compile(optimizer or "adam", logits_loss(), **options)
        model.build(np.zeros((1, 6), np.float32))
    return model


def by_fit(model, x, y):
    model.fit(x, y, batch_size=6, epochs=2, verbose=0)


def by_run(model, x, y):
    dataset = trainer.data.Dataset.from_arrays((x, y)).batch(6)
    state, step = model.state, custom_step(model)
    for inputs in model.strategy.experimental_distribute_dataset(dataset):
        state, _ = model.strategy.run(step, args=(state, inputs))
    model.state = state


def odd_statistics(model):
    """Sets running averages whose thirds are not exact, and returns them."""
    state = model.state
    statistics = jax.tree.map(lambda leaf: jnp.linspace(0.1, 0.9, leaf.size).reshape(leaf.shape), state.model_state)
    model.state = state.replace(model_state=statistics)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(statistics)]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("train", [by_fit, by_run])
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
def test_statistics_that_a_step_leaves_alone_keep_their_bits(train, module):
    model = built(module=module(batch_norm=True), freeze=["BatchNorm.*", "norm"][module is NNXMLP:][:1])
    before = odd_statistics(model)
    train(model, *classification(12)[:2])
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(model.state.model_state)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("train", [by_fit, by_run])
def test_statistics_that_a_step_changes_are_the_mean_over_the_replicas(train):
    model = built(batch_norm="per_replica")
    train(model, *classification(12)[:2])
    for leaf in jax.tree.leaves(model.state.model_state):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == REPLICAS and all((copy == copies[0]).all() for copy in copies)


@pytest.mark.slow
@pytest.mark.parametrize("train", [by_fit, by_run])
def test_a_skipped_update_leaves_the_model_state_as_it_was(train):
    model = built(skip_non_finite=True)
    before = jax.tree.map(np.asarray, (model.state.params, model.state.model_state))
    x, y, _ = classification(6)
    train(model, np.full_like(x, np.nan), y)
    after = jax.tree.map(np.asarray, (model.state.params, model.state.model_state))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.state.skipped_updates.total) == int(model.state.step) > 0


def test_model_state_of_nnx_objects_follows_the_rule():
    class Counting(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(2))
            self.mean = nnx.Variable(jnp.zeros(()))
            self.unused = nnx.Variable(jnp.float32(0.1))
            self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    def step(net, x):
        net.mean.set_value(x.mean())
        net.steps.set_value(net.steps.get_value() + 1)
        return x.sum()

    strategy = mirrored(REPLICAS)
    with strategy.scope():
        net = Counting()
    dataset = trainer.data.Dataset.from_arrays(np.arange(6, dtype=np.float32)).batch(6)
    for x in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(net, x))
    assert float(net.mean.get_value()) == pytest.approx(2.5)  # of 0.5, 2.5 and 4.5
    assert (float(net.unused.get_value()), int(net.steps.get_value())) == (np.float32(0.1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda rate: trainer.optimizers.Adam(rate, clipnorm=1.0), optax.adamw])
def test_states_of_equally_compiled_models_share_a_program(make):
    strategy, traces = mirrored(2), []
    with strategy.scope():
        models = [trainer.Model(LinenMLP(), seed=seed) for seed in (1, 1, 1)]
        for model, rate in zip(models, (0.01, 0.01, 0.02), strict=True):
            model.compile(make(rate), "mse", freeze=["Dense_0"])
            model.build(np.zeros((1, 6), np.float32))

    def step(state):
        traces.append(state)
        return state.apply_gradients(jax.tree.map(jnp.ones_like, state.params))

    def run(model):
        traces.clear()
        model.state = strategy.run(step, args=(model.state,))
        return bool(traces), model.get_weights()

    (first, weights), (second, same), (third, others) = map(run, models)
    assert (first, second, third) == (True, False, True)
    assert all((one == other).all() for one, other in zip(weights, same, strict=True))
    assert not all((one == other).all() for one, other in zip(weights, others, strict=True))
