"""S1: any number of replicas, any number of rows and any batch size give one device's numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored


def run(module, replicas, rows, batch_size, epochs=2, optimizer=None, **options):
    """Trains, evaluates and predicts; returns weights, history, logs and predictions."""
    x, y, w = classification(rows)
    with mirrored(replicas).scope():
        model = trainer.Model(module(), seed=3)
        model.compile(
            optimizer or optax.sgd(0.1, momentum=0.9), logits_loss(), metrics=["accuracy"],
            weighted_metrics=[trainer.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce")], **options)
    history = model.fit(x, y, sample_weight=w, batch_size=batch_size, epochs=epochs, verbose=0).history
    logs = model.evaluate(x, y, sample_weight=w, batch_size=batch_size, verbose=0)
    return model.get_weights(), history, logs, model.predict(x, batch_size=batch_size, verbose=0)


def assert_same(one, many, rtol=3e-4, atol=3e-5):
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("library", [LinenMLP, NNXMLP])
@settings(max_examples=4, derandomize=True)
@given(replicas=st.integers(2, 8), rows=st.integers(1, 70), batch_size=st.integers(1, 33))
def test_any_replicas_rows_and_batch_size_give_one_devices_numbers(library, batch_norm, replicas, rows, batch_size):
    def module():
        return library(batch_norm=batch_norm)

    # Up to 140 steps with the statistics of few rows magnify the rounding of sums in another order.
    tolerance = {"rtol": 1e-3, "atol": 3e-4} if batch_norm else {}
    assert_same(run(module, 1, rows, batch_size), run(module, replicas, rows, batch_size), **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_every_reduction_of_a_loss_gives_one_devices_numbers(reduction):
    def fit(replicas):
        x, y, w = classification(21)
        with mirrored(replicas).scope():
            model = trainer.Model(LinenMLP(), seed=3)
            model.compile(optax.sgd(0.01), logits_loss(reduction=reduction))
        history = model.fit(x, y, sample_weight=w, batch_size=8, epochs=2, verbose=0).history
        return model.get_weights(), history

    assert_same(fit(1), fit(3))


@pytest.mark.slow
def test_a_loss_that_returns_one_scalar_gives_one_devices_numbers():
    def mean_squared(y_true, y_pred):
        return jnp.mean((y_true - y_pred) ** 2)

    def fit(replicas):
        x, _, _ = classification(13)
        with mirrored(replicas).scope():
            model = trainer.Model(LinenMLP(classes=6), seed=3)
            model.compile(optax.sgd(0.1), mean_squared, metrics=[mean_squared])
        history = model.fit(x, x, batch_size=8, epochs=2, verbose=0).history
        np.testing.assert_allclose(history["mean_squared"], history["loss"], rtol=1e-5)
        return model.get_weights(), history

    assert_same(fit(1), fit(4))


class Plain(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return jnp.square(x - y_pred).mean()


class ByCompiledLoss(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, x, y_pred, sample_weight)


class ByRow(trainer.Model):
    """A mean as it is written in `strategy.run`."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        context = trainer.distribute.get_replica_context()
        per_row = jnp.square(x - y_pred).mean(-1) * context.row_mask
        return per_row.sum() * context.num_replicas_in_sync / context.global_rows


def autoencoder(kind, replicas, **options):
    with mirrored(replicas).scope():
        model = kind(LinenMLP(classes=6), seed=3)
        model.compile(optax.sgd(0.1), "mse", **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "options"), [(4, {}), (2, {"microbatches": 3})])
@pytest.mark.parametrize("kind", [Plain, ByCompiledLoss, ByRow])
def test_an_overridden_loss_gives_one_devices_numbers(kind, replicas, options):
    def fit(model):
        x, _, _ = classification(13)
        history = model.fit(x, x, batch_size=8, epochs=2, verbose=0).history
        return model.get_weights(), history, model.evaluate(x, x, batch_size=8, verbose=0)

    assert_same(fit(autoencoder(Plain, 1, **options)), fit(autoencoder(kind, replicas, **options)))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(nn.LSTMCell(5))(x)[:, -1])


class NNXRecurrent(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(nnx.LSTMCell(2, 5, rngs=rngs))
        self.last = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.rnn(x)[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("module", [Recurrent, NNXRecurrent])
def test_a_recurrent_network_gives_one_devices_numbers(module):
    def fit(replicas):
        x, y, _ = classification(11, features=8)
        with mirrored(replicas).scope():
            model = trainer.Model(module(), seed=3)
            model.compile(optax.sgd(0.1), logits_loss())
        history = model.fit(x.reshape(11, 4, 2), y, batch_size=4, epochs=2, verbose=0).history
        return model.get_weights(), history

    assert_same(fit(1), fit(3))


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
def test_dropout_draws_one_devices_masks_other_ones_in_each_step(module):
    class Masks(trainer.Model):
        def train_step(self, state, batch):
            x, _, _ = trainer.unpack_x_y_sample_weight(batch)
            outputs, _ = self.apply(state.params, state, jnp.ones_like(x), training=True)
            logs, state = super().train_step(state, batch)
            return {**logs, "drawn": jnp.abs(outputs * jnp.arange(len(x))[:, None]).sum()}, state

    def fit(replicas):
        x, y, _ = classification(16 + 5)
        with mirrored(replicas).scope():
            model = Masks(module(dropout=0.5), seed=1)
            model.compile(optax.sgd(0.1), logits_loss())
        history = model.fit(x, y, batch_size=16, epochs=4, verbose=0).history
        return model.get_weights(), history

    one, four = fit(1), fit(4)
    assert_same(one, four)
    assert len(set(one[1]["drawn"])) == 4, "the same masks in each epoch"


@pytest.mark.slow
def test_per_replica_batch_norm_differs_from_global_and_keeps_replicas_alike():
    one = run(lambda: LinenMLP(batch_norm=True), 1, 32, 16)
    local = run(lambda: LinenMLP(batch_norm=True), 4, 32, 16, batch_norm="per_replica")
    same = run(lambda: LinenMLP(batch_norm=True), 4, 32, 16)
    assert_same(one, same, rtol=2e-3, atol=2e-4)
    assert not np.allclose(one[1]["loss"], local[1]["loss"], rtol=1e-3)
    assert np.isfinite(local[1]["loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"steps_per_execution": 1}, {"steps_per_execution": 3}, {"run_eagerly": True}])
def test_fused_unfused_and_eager_steps_give_the_same_numbers(options):
    assert_same(run(LinenMLP, 2, 37, 8), run(LinenMLP, 2, 37, 8, **options))


@pytest.mark.slow
def test_fused_steps_give_the_same_bits_however_they_are_cut():
    def fit(callbacks):
        x, y, _ = classification(64)
        with mirrored(2).scope():
            model = trainer.Model(LinenMLP(batch_norm=True, dropout=0.3), seed=3)
            model.compile("adam", logits_loss(), metrics=["accuracy"], steps_per_execution=5)
        history = model.fit(x, y, batch_size=8, epochs=3, callbacks=callbacks, verbose=0).history
        return model.get_weights(), history

    each_batch = trainer.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    groups_of_five, single = fit([]), fit([each_batch])
    for ours, theirs in zip(groups_of_five[0], single[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert groups_of_five[1] == single[1]


@pytest.mark.slow
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
def test_one_device_gives_the_numbers_of_a_loop_written_by_hand(module):
    x, y, w = classification(37)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.2, momentum=0.9))
    model = trainer.Model(module(), seed=3)
    model.compile(tx, logits_loss(), metrics=["accuracy"])
    model.build(x)
    state = model.state
    history = model.fit(x, y, sample_weight=w, batch_size=16, epochs=2, shuffle=False, verbose=0).history

    params, opt_state = state.params, tx.init(state.params)
    for _ in range(2):
        losses, sizes, hits = [], [], 0
        for start in range(0, 37, 16):
            rows = slice(start, start + 16)

            def loss_and_logits(params, rows=rows):
                logits, _ = model.apply(params, state, x[rows])
                each = optax.softmax_cross_entropy_with_integer_labels(logits, y[rows])
                return (each * w[rows]).mean(), logits

            (loss, logits), grads = jax.value_and_grad(loss_and_logits, has_aux=True)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
            sizes.append(len(logits))
            hits += int((logits.argmax(-1) == y[rows]).sum())
    np.testing.assert_allclose(history["loss"][-1], np.average(losses, weights=sizes), rtol=1e-5)
    np.testing.assert_allclose(history["accuracy"][-1], hits / 37, rtol=1e-6)
    for ours, theirs in zip(model.get_weights(), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_loss_of_the_batch_as_a_whole_trains_on_one_device():
    def spread(y_true, y_pred):
        return jnp.std(y_pred) + 0.0 * jnp.sum(y_true)

    x, y, _ = classification(8)
    with mirrored(1).scope():
        model = trainer.Model(LinenMLP(), seed=3)
        model.compile(optax.sgd(0.1), spread)
    model.build(x)
    expected = np.std(model.predict(x, verbose=0))
    np.testing.assert_allclose(model.fit(x, y, batch_size=8, verbose=0).history["loss"], [expected], rtol=1e-5)
