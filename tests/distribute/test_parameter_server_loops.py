"""Loops of one's own on parameter servers: the step of `strategy.run`, scheduled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import distribute

pytestmark = pytest.mark.processes
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 5)).astype(np.float32)
y = (x @ rng.normal(size=(5, 1))).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not training)(nn.Dense(4)(x)))


@pytest.fixture(scope="module")
def strategy():
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=2) as strategy:
        yield strategy


def made(strategy):
    with strategy.scope():
        model = trainer.Model(Net(), seed=0)
        model.compile(optax.sgd(0.05), "mse")
        model.build(x[:2])
    return model


def step_of(model):
    def step(state, batch):
        def loss_fn(params):
            outputs, model_state = model.apply(params, state, batch[0], training=True)
            return jnp.mean((outputs - batch[1]) ** 2), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, model_state=model_state), loss

    return step


def test_scheduled_steps_train_the_model(strategy):
    model, coordinator = made(strategy), distribute.ClusterCoordinator(strategy)
    step = step_of(model)

    def train(batch):
        _, loss = strategy.run(step, args=(model.state, batch))
        return float(loss)

    values = [coordinator.schedule(train, ((x[start:start + 16], y[start:start + 16]),))
              for _ in range(10) for start in range(0, 64, 16)]
    coordinator.join()
    losses = coordinator.fetch(values)
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
    assert int(model.state.step) == 40 == int(model.state.opt_state.count)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    assert int(model.state.step) == 44


def test_one_step_after_the_other_gives_the_numbers_of_one_device(strategy):
    model, expected = made(strategy), made(distribute.OneDeviceStrategy())
    coordinator, step, own_step = strategy.coordinator, step_of(model), step_of(expected)

    def train(batch):
        return strategy.run(step, args=(model.state, batch))[1]

    for start in range(0, 64, 16):
        batch = x[start:start + 16], y[start:start + 16]
        loss = coordinator.schedule(train, (batch,)).fetch()
        state, own_loss = expected.strategy.run(own_step, args=(expected.state, batch))
        expected.state = state
        np.testing.assert_allclose(loss, own_loss.values[0], rtol=1e-5)
    for received, wanted in zip(jax.tree.leaves(model.state), jax.tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(received, wanted, rtol=1e-5, atol=1e-6)


def test_a_state_that_is_assigned_is_the_one_that_trains(strategy):
    model = made(strategy)
    step = step_of(model)

    def train(batch):
        return strategy.run(step, args=(model.state, batch))[1]

    def read():
        return np.asarray(jax.tree.leaves(model.state.params)[0])

    strategy.coordinator.schedule(train, ((x, y),)).fetch()
    model.state = jax.tree.map(lambda leaf: leaf * 0, model.state)
    assert not strategy.coordinator.schedule(read).fetch().any()


def test_each_worker_reads_its_own_dataset(strategy):
    model = made(strategy)
    step, coordinator = step_of(model), strategy.coordinator

    def batches():
        while True:
            yield x[:16], y[:16]

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def train(iterator):
        return float(strategy.run(step, args=(model.state, next(iterator)))[1])

    assert len(coordinator.fetch([coordinator.schedule(train, (iterator,)) for _ in range(6)])) == 6
    assert int(model.state.step) == 6


@pytest.mark.parametrize("number", [0, 2])
def test_a_state_that_was_not_just_read_is_refused(strategy, number):
    model = made(strategy)
    step = step_of(model)

    def train(batch):
        states = [model.state.replace(step=jnp.zeros((), jnp.int32)) if number == 0 else model.state for _ in range(2)]
        strategy.run(lambda first, second: step(first, batch)[1], args=tuple(states))

    strategy.coordinator.schedule(train, ((x, y),))
    with pytest.raises(ValueError, match=r"takes one state.*Received: 2 states"):
        strategy.coordinator.join()


def test_a_model_without_weights_says_to_build_it(strategy):
    with strategy.scope():
        model = trainer.Model(nn.Dense(1))
        model.compile("sgd", "mse")
    strategy.coordinator.schedule(lambda: model.state)
    with pytest.raises(RuntimeError, match=r"no weights yet.*`build"):
        strategy.coordinator.join()
