"""A batch in parts: one update per batch, and the numbers of the whole batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer.distribute import get_replica_context
from trainer.engine.model.core.model_core import core_of


def trained(make_model, replicas=1, rows=21, batch_size=8, loss=None, seed=3, **options):
    """Returns the weights and the history of two epochs, the last batch of each uneven."""
    x, y, w = classification(rows)
    with mirrored(replicas).scope():
        model = make_model(seed)
        model.compile(optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.2, momentum=0.9)),
                      loss or logits_loss(), metrics=["accuracy", trainer.metrics.SparseTopKCategoricalAccuracy(k=2)],
                      weighted_metrics=[trainer.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce")],
                      **options)
    history = model.fit(x, y, sample_weight=w, batch_size=batch_size, epochs=2, verbose=0).history
    return model.get_weights(), history


def assert_same(one, other, rtol=2e-4, atol=2e-5):
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "replicas", "microbatches"), [
    ("sum_over_batch_size", 1, 3), ("sum_over_batch_size", 4, 64), ("sum", 3, 2), ("mean_with_sample_weight", 2, 3)])
def test_microbatches_give_the_numbers_of_the_whole_batch(reduction, replicas, microbatches):
    # 8 rows do not divide by 3 parts, and the last batch of 5 rows neither by replicas nor by parts.
    def fit(**options):
        return trained(lambda seed: trainer.Model(LinenMLP(), seed=seed), loss=logits_loss(reduction=reduction),
                       **options)

    assert_same(fit(), fit(replicas=replicas, microbatches=microbatches))


@pytest.mark.slow
def test_an_nnx_model_and_an_ignored_class_give_the_numbers_of_the_whole_batch():
    def fit(**options):
        return trained(lambda seed: trainer.Model(NNXMLP(), seed=seed), loss=logits_loss(ignore_class=1), **options)

    assert_same(fit(), fit(replicas=2, microbatches=3))


class Regularised(trainer.Model):
    """A loss of its own, with terms that are means over rows."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        context = get_replica_context()
        per_row = (y_pred ** 2).mean(-1) * context.row_mask
        penalty = per_row.sum() * context.num_replicas_in_sync / context.global_rows
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * penalty

    def compute_metrics(self, x, y, y_pred, sample_weight):
        context = get_replica_context()
        size = (jnp.abs(y_pred).mean(-1) * context.row_mask).sum() * context.num_replicas_in_sync / context.global_rows
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "size": size}


@pytest.mark.slow
def test_an_overridden_loss_and_overridden_metrics_give_the_numbers_of_the_whole_batch():
    def fit(**options):
        return trained(lambda seed: Regularised(LinenMLP(), seed=seed), **options)

    assert_same(fit(), fit(replicas=2, microbatches=3))


@pytest.mark.slow
def test_there_is_one_update_per_batch():
    x, y, _ = classification(12)
    model = trainer.Model(LinenMLP(), seed=3)
    model.compile("adam", logits_loss(), microbatches=4)
    model.fit(x, y, batch_size=6, epochs=1, verbose=0)
    assert model.optimizer.iterations == 2
    assert int(model.state.step) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 3), (2, 2), (4, 3)])
def test_the_running_averages_of_batch_norm_move_with_each_part(replicas, microbatches):
    x, y, _ = classification(10)

    def fit(batches, **options):
        with mirrored(options.pop("replicas", 1)).scope():
            model = trainer.Model(LinenMLP(batch_norm=True), seed=3)
            model.compile(optax.sgd(0.0), logits_loss(), **options)
        model.fit(batches, verbose=0)
        return jax.device_get(model.state.model_state["batch_stats"]["BatchNorm_0"])

    parts = [(x[part::microbatches], y[part::microbatches]) for part in range(microbatches)]
    assert_same(fit([(x, y)], replicas=replicas, microbatches=microbatches), fit(parts))


@pytest.mark.slow
def test_batch_norm_of_a_microbatch_is_that_of_its_rows():
    """Two parts see what two batches would: rows 0, 2, 4, 6 and rows 1, 3, 5, 7."""
    x, y, _ = classification(8)

    def weights_of(model):
        return jax.tree.leaves(jax.device_get(model.state.params))

    def gradients_of(rows):
        model = trainer.Model(LinenMLP(batch_norm=True), seed=3)
        model.compile(optax.sgd(1.0), logits_loss())
        model.build(x)
        before = weights_of(model)
        model.fit(x[rows], y[rows], batch_size=8, shuffle=False, verbose=0)
        return [after - weights for after, weights in zip(weights_of(model), before, strict=True)]

    first, second = gradients_of(slice(0, 8, 2)), gradients_of(slice(1, 8, 2))
    model = trainer.Model(LinenMLP(batch_norm=True), seed=3)
    model.compile(optax.sgd(1.0), logits_loss(), microbatches=2)
    model.build(x)
    before = weights_of(model)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for after, weights, one, other in zip(weights_of(model), before, first, second, strict=True):
        np.testing.assert_allclose(after - weights, (one + other) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_microbatch_draws_masks_of_its_own():
    class Masks(nn.Module):
        @nn.compact
        def __call__(self, x, training=False):
            shift = self.param("shift", nn.initializers.zeros, (4,))
            return nn.Dropout(0.5, deterministic=not training)(jnp.ones_like(x)) + shift

    class Kept(trainer.Model):
        def compute_metrics(self, x, y, y_pred, sample_weight):
            kept = (y_pred > 0).astype(jnp.float32)
            # Whether the masks of the first and of the second part are alike shows in the mean of their product.
            return {f"kept_{index}": kept[0, index] for index in range(4)}

    x = np.ones((8, 4), np.float32)
    with mirrored(2).scope():
        model = Kept(Masks(), seed=0)
        model.compile(optax.sgd(0.0), "mse", microbatches=4)
    history = model.fit(x, x, batch_size=8, epochs=1, verbose=0).history
    # Eight parts in all: the same mask in all of them would give means of 0 and 1 only.
    means = [history[f"kept_{index}"][0] for index in range(4)]
    assert any(0 < mean < 1 for mean in means)


@pytest.mark.slow
def test_less_memory_is_needed_for_activations():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = nn.tanh(nn.Dense(64)(x))
            return nn.Dense(3)(x)

    def temporary_bytes(microbatches):
        x, y, _ = classification(512)
        model = trainer.Model(Wide(), seed=0)
        model.compile("sgd", logits_loss(), microbatches=microbatches, steps_per_execution=1)
        phase = core_of(model).prepared_phase("train", (x, y))
        return phase.lowered((x, y)).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 0.5 * temporary_bytes(1)


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, True, "2"])
def test_microbatches_are_a_count(microbatches):
    with pytest.raises((ValueError, TypeError), match="microbatches"):
        trainer.Model(LinenMLP()).compile("sgd", "mse", microbatches=microbatches)


def test_an_overridden_train_step_is_refused():
    class Custom(trainer.Model):
        def train_step(self, state, batch):
            return super().train_step(state, batch)

    with pytest.raises(ValueError, match=r"overrides it.*compute_loss"):
        Custom(LinenMLP()).compile("sgd", "mse", microbatches=2)


class Noting(nn.Module):
    """Keeps the largest number that each call has seen, and how many calls there were."""

    @nn.compact
    def __call__(self, x, training: bool = False):
        calls = self.variable("usage", "calls", jnp.zeros, (), jnp.int32)
        seen = self.variable("usage", "seen", jnp.zeros, (8,))
        if training and not self.is_initializing():
            seen.value = seen.value.at[calls.value].set(x.max())
            calls.value += 1
        return nn.Dense(1)(x)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_part_has_every_so_many_rows_and_the_state_passes_from_part_to_part(replicas):
    x = np.arange(14, dtype=np.float32)[:, None]
    with mirrored(replicas).scope():
        model = trainer.Model(Noting())
        model.compile(optax.sgd(0.0), "mse", microbatches=3)
    model.fit(x, x, batch_size=14, shuffle=False, verbose=0)
    usage = model.state.model_state["usage"]
    assert int(usage["calls"]) == 3
    assert usage["seen"].tolist()[:4] == [12.0, 13.0, 11.0, 0.0]  # 0, 3, ... 12; 1, 4, ... 13; 2, 5, ... 11


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("method", ["all_reduce", "all_gather"])
def test_reductions_leave_a_part_as_it_is(method, replicas):
    class Contrastive(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            context = get_replica_context()
            assert (context.num_replicas_in_sync, context.rows) == (1, len(x))
            gathered = context.all_gather(y_pred) if method == "all_gather" else context.all_reduce("mean", y_pred)
            return jnp.square(gathered @ y_pred.T).mean()

    def trained(**options):
        with mirrored(replicas).scope():
            model = Contrastive(LinenMLP())
            model.compile(optax.sgd(0.01), **options)
        x, y, _ = classification(8)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    parts = trained(microbatches=2)
    assert not all(np.allclose(*pair) for pair in zip(parts, trained(), strict=True))


def test_a_scalar_loss_is_said_to_be_averaged_over_the_parts():
    model = trainer.Model(LinenMLP(classes=6))
    model.compile("sgd", lambda y, y_pred: jnp.sqrt(jnp.mean((y - y_pred) ** 2)), microbatches=2)
    x, _, _ = classification(8)
    with pytest.warns(UserWarning, match="returns one scalar. With `microbatches` it is computed for each"):
        model.fit(x, x, verbose=0)
