"""Losses of a batch as a whole, trained on several replicas with uneven last batches."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, losses

rng = np.random.default_rng(0)
X = rng.normal(size=(21, 6)).astype(np.float32)
LOSSES = {
    "dice": (losses.Dice(), rng.integers(2, size=(21, 3)).astype(np.float32), [nn.Dense(3), nn.sigmoid]),
    "dice of rows": (losses.Dice(axis=(1,)), rng.integers(2, size=(21, 3)).astype(np.float32),
                     [nn.Dense(3), nn.sigmoid]),
    "tversky": (losses.Tversky(0.3, 0.7), rng.integers(2, size=(21, 3)).astype(np.float32), [nn.Dense(3), nn.sigmoid]),
    "circle": (losses.Circle(gamma=2.0), rng.integers(3, size=21), [
        nn.Dense(3), lambda x: x / (1e-3 + (x ** 2).sum(-1, keepdims=True)) ** 0.5]),
    "sum": (losses.Circle(gamma=2.0, reduction="sum"), rng.integers(3, size=21), [nn.Dense(3), nn.tanh]),
}


class OwnStep(trainer.Model):
    """Calls the loss itself."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        return self.own_loss(y, y_pred)


def fitted(name, replicas, own=False, weights=None, rows=21):
    loss, y, layers = LOSSES[name]
    with distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)]).scope():
        model = (OwnStep if own else trainer.Model)(nn.Sequential(layers), seed=0)
        model.own_loss = loss
        model.compile("sgd", None if own else loss)
    logs = model.fit(X[:rows], y[:rows], sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return logs.history, model.get_weights(), model.evaluate(X[:rows], y[:rows], batch_size=8, verbose=0)


def assert_close(found, expected):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [21, 19])  # a last batch of 5 rows is padded on 2 and 4 replicas, one of 3 on 2
def test_several_replicas_train_as_one(name, rows):
    expected = fitted(name, 1, rows=rows)
    assert_close(fitted(name, 2, rows=rows), expected)
    assert_close(fitted(name, 4, rows=rows), expected)


@pytest.mark.slow
def test_a_loss_called_in_a_step_of_ones_own_is_that_of_the_batch():
    assert_close(fitted("dice", 4, own=True), fitted("dice", 1))


@pytest.mark.slow
def test_weights_of_rows_are_those_of_one_device():
    weights = rng.uniform(size=21)
    assert_close(fitted("circle", 4, weights=weights), fitted("circle", 1, weights=weights))


def test_microbatches_are_refused():
    loss, y, layers = LOSSES["dice"]
    model = trainer.Model(nn.Sequential(layers))
    model.compile("sgd", loss, microbatches=2)
    with pytest.raises(ValueError, match=r"'dice' is of a batch as a whole, which `microbatches` computes in parts"):
        model.fit(X, y, batch_size=8, verbose=0)
