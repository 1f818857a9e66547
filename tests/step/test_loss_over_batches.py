"""A loss that divides by weights, or by the values that it keeps: `evaluate` gives that of one batch of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import losses
from trainer.core import replica_context
from trainer.engine.step.loss_terms import WeightedLossTerm, exact_over_batches

RNG = np.random.default_rng(0)
X = RNG.normal(size=(14, 4, 5)).astype(np.float32)
Y = RNG.normal(size=(14, 4, 3)).astype(np.float32)
WEIGHTS = RNG.uniform(0, 5, size=14).astype(np.float32)
LABELS = RNG.integers(0, 3, size=(14, 4))
LABELS[:6, 1:] = -1  # so that batches keep other numbers of values
LABELS[12:] = -1

WEIGHTED = losses.MeanSquaredError(reduction="mean_with_sample_weight")
MASKED = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"label": nn.Dense(3)(x), "value": nn.Dense(3)(x)}


class Penalised(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.5


class Doubled(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) + super().compute_loss(x, y, -y_pred, sample_weight)


CASES = {  # what is compiled, and the data
    "weights": (trainer.Model, nn.Dense(3), {"loss": WEIGHTED}, Y, WEIGHTS),
    "ignored labels": (trainer.Model, nn.Dense(3), {"loss": MASKED}, LABELS, None),
    "ignored labels and weights": (trainer.Model, nn.Dense(3), {"loss": MASKED}, LABELS, WEIGHTS),
    "two outputs": (trainer.Model, TwoHeads(), {
        "loss": {"label": MASKED, "value": WEIGHTED}, "loss_weights": {"label": 0.5, "value": 2.0}},
        {"label": LABELS, "value": Y}, WEIGHTS),
    "one of two outputs": (trainer.Model, TwoHeads(), {"loss": {"label": MASKED, "value": "mse"}},
                           {"label": LABELS, "value": Y}, WEIGHTS),
    "an added term": (Penalised, nn.Dense(3), {"loss": WEIGHTED}, Y, WEIGHTS),
    "two losses of one output": (Doubled, nn.Dense(3), {"loss": WEIGHTED}, Y, WEIGHTS),
}


def evaluated(case, batch_size, replicas):
    kind, module, options, y, weights = CASES[case]
    with trainer.distribute.MirroredStrategy(devices=jax.local_devices()[:replicas]).scope():
        model = kind(module)
        model.compile(optax.sgd(0.0), **options)
    return model, model.evaluate(X, y, sample_weight=weights, batch_size=batch_size, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_evaluate_in_batches_gives_the_loss_of_all_rows(case):
    _, whole = evaluated(case, 14, 1)
    for replicas in (1, 4):
        _, logs = evaluated(case, 4, replicas)
        assert list(logs) == list(whole)
        np.testing.assert_allclose(list(logs.values()), list(whole.values()), rtol=1e-5)


def test_sets_with_and_without_weights_are_evaluated_by_one_model():
    model, of_rows = evaluated("weights", 4, 1)
    weighted, plain = ((X, Y, WEIGHTS), (X, Y))
    sets = model.evaluate({"weighted": weighted, "plain": plain}, batch_size=4, verbose=0)
    errors = np.square(Y - model.predict(X, verbose=0)).mean((1, 2))
    np.testing.assert_allclose(sets["weighted_loss"], of_rows["loss"], rtol=1e-5)
    np.testing.assert_allclose(sets["plain_loss"], errors.mean(), rtol=1e-5)


def test_the_loss_is_the_sum_of_the_outputs_means_times_their_weights():
    parts = [WeightedLossTerm("label", 0.5, jnp.float32(6), jnp.float32(3)),
             WeightedLossTerm("value", 2.0, jnp.float32(4), jnp.float32(1))]
    with replica_context.enter(replica_context.ReplicaContext(rows=4)):
        logs = exact_over_batches({"loss": jnp.float32(9.25), "value_loss": jnp.float32(4)}, parts, parts[1:])
    results = {name: float(value.metric.stateless_result(value.variables)) for name, value in logs.items()}
    assert results == {"loss": 0.5 * 6 / 3 + 2.0 * 4 / 1 + 0.25, "value_loss": 4.0}  # with an additional term


@pytest.mark.slow
def test_the_loss_of_all_rows_is_that_of_the_loss_itself():
    model, logs = evaluated("weights", 4, 4)
    np.testing.assert_allclose(logs["loss"], WEIGHTED(Y, model.predict(X, verbose=0), WEIGHTS), rtol=1e-5)


@pytest.mark.slow
def test_validation_is_exact_and_training_reports_the_mean_of_batches_by_rows_as_keras_does():
    model, logs = evaluated("weights", 4, 1)
    history = model.fit(X, Y, sample_weight=WEIGHTS, validation_data=(X, Y, WEIGHTS), batch_size=4, shuffle=False,
                        verbose=0).history
    np.testing.assert_allclose(history["val_loss"], logs["loss"], rtol=1e-5)
    predictions, starts = model.predict(X, verbose=0), range(0, 14, 4)
    each = [float(WEIGHTED(Y[at:at + 4], predictions[at:at + 4], WEIGHTS[at:at + 4])) for at in starts]
    np.testing.assert_allclose(history["loss"], np.average(each, weights=[4, 4, 4, 2]), rtol=1e-5)
