"""Which of the two lowerings a step gets, and that both have one device's numbers."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, losses, metrics

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 6)).astype(np.float32)
Y = rng.integers(0, 3, 32)
LONG = rng.normal(size=(16, 5, 6)).astype(np.float32)
CROSSENTROPY = losses.SparseCategoricalCrossentropy(from_logits=True)


class Plain(nn.Module):
    mixes: bool = False
    drops: bool = False
    normalizes: bool = False
    counts: bool = False
    sows: bool = False

    @nn.compact
    def __call__(self, x, training: bool = False):
        x = nn.relu(nn.Dense(8)(x))
        if self.normalizes:
            x = nn.BatchNorm(use_running_average=not training)(x)
        if self.drops:
            x = nn.Dropout(0.5, deterministic=not training)(x)
        if self.mixes:
            x = x - x.mean(0)
        if self.counts:
            seen = self.variable("usage", "seen", jnp.zeros, ())
            if training and not self.is_initializing():
                seen.value += x.sum()
        if self.sows:
            self.sow("losses", "activity", jnp.square(x).mean())
        return nn.Dense(3)(x)


class Asks(nn.Module):
    asked: str

    @nn.compact
    def __call__(self, x):
        context = distribute.get_replica_context()
        x = nn.Dense(3)(x)
        if self.asked == "reduced":
            return context.all_reduce("sum", x)
        number = {"number": lambda: context.num_replicas_in_sync, "place": lambda: context.replica_id_in_sync_group,
                  "strategy": lambda: distribute.get_strategy().num_replicas_in_sync}[self.asked]()
        return x * (1.0 + number)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + jax.random.normal(jax.random.key(0, impl="rbg"), (len(x), 3))


class DependsOnRows(nn.Module):
    """Does another thing for some numbers of rows, be they a replica's or all."""

    numbers: tuple

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x * 2 if len(x) in self.numbers else x)


class Weighted(nn.Module):
    """Outputs of rows, and a penalty of the weights."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 3))
        return {"logits": x @ kernel, "penalty": jnp.square(kernel).sum()}


class Penalty(losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred


class OwnLoss(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight)


class OwnApply(trainer.Model):
    def apply(self, params, state, x, **options):
        return super().apply(params, state, x - x.mean(0), **options)


def per_row(y, y_pred):
    return optax.softmax_cross_entropy_with_integer_labels(y_pred, y)


def of_batch(y, y_pred):
    return per_row(y, y_pred).mean()


def model_of(strategy, module=None, make=trainer.Model, loss=CROSSENTROPY, **options):
    with strategy.scope():
        model = make(module or Plain())
        model.compile(optax.sgd(0.1), loss, **options)
    return model


def mirrored(count, **options):
    return distribute.MirroredStrategy([f"cpu:{index}" for index in range(count)], **options)


REPLICATED = {
    "a plain module": {},
    "BatchNorm": {"module": Plain(normalizes=True)},
    "a loss with a value for each row": {"loss": per_row},
    "metrics by name": {"metrics": ["accuracy", metrics.SparseTopKCategoricalAccuracy(2)]},
    "microbatches that divide": {"microbatches": 2},
    "dropout": {"module": Plain(drops=True)},
}
PARTITIONED = {
    "an overridden method": ({"make": OwnLoss}, "`compute_loss` may do anything with the batch"),
    "an overridden application": ({"make": OwnApply}, "`apply` may do anything with the batch"),
    "rows that mix": ({"module": Plain(mixes=True)}, r"rows are combined \(`reduce_sum`\)"),
    "numbers of another generator": ({"module": Noisy()}, "numbers are drawn at random"),
    "the rows of a replica": ({"module": DependsOnRows((8,))}, "it computes with the number of rows"),
    "the rows of the batch": ({"module": DependsOnRows((32,))}, "it computes with the number of rows"),
    "the rows of a part": ({"module": DependsOnRows((4,)), "microbatches": 2}, "it computes with the number of rows"),
    "a state of its own": ({"module": Plain(counts=True)}, r"rows are combined \(`reduce_sum`\)"),
    "a sown loss": ({"module": Plain(sows=True)}, "the module adds to the loss"),
    "a scalar loss": ({"loss": of_batch}, "a loss returns other values than one for each row"),
    "a loss of the batch": ({"loss": losses.Circle()}, "the loss 'circle' may be of the batch as a whole"),
    "a metric of one's own": ({"metrics": [per_row]}, "the metric .* is the user's own"),
    "microbatches that do not divide": ({"microbatches": 3}, "8 rows of a replica do not divide by 3 microbatches"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLICATED)
def test_what_treats_rows_apart_is_replicated(case, caplog):
    with caplog.at_level(logging.INFO, "trainer"):
        report = mirrored(4).explain(model_of(mirrored(1), **REPLICATED[case]), batch=(X, Y))
    assert report.partitioned_because is None
    assert "The step is replicated: each replica computes its rows." in str(report)
    assert "The train step is replicated." in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a plain module", "BatchNorm", "metrics by name", "dropout"])
def test_one_row_for_each_replica_is_enough(case):
    model = model_of(mirrored(1), **REPLICATED[case])
    assert mirrored(4).explain(model, batch=(X[:4], Y[:4])).partitioned_because is None


@pytest.mark.slow
@pytest.mark.parametrize("case", PARTITIONED)
def test_what_may_look_at_other_rows_is_partitioned_and_the_report_says_why(case, caplog):
    options, reason = PARTITIONED[case]
    model = model_of(mirrored(1), **options)
    with caplog.at_level(logging.INFO, "trainer"):
        report = mirrored(4).explain(model, batch=(X, Y))
    assert re.search(reason, report.partitioned_because)
    assert f"The step is partitioned: {report.partitioned_because}." in str(report)
    assert f"The train step is partitioned: {report.partitioned_because}." in caplog.messages


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("options", "reason"), [
    ({"loss": losses.CategoricalCrossentropy(from_logits=True, axis=0)},
     "the loss 'categorical_crossentropy' may be of the batch as a whole"),
    ({"loss": losses.CosineSimilarity(axis=-2)}, "the loss 'cosine_similarity' may be of the batch as a whole"),
    ({"loss": "mse", "metrics": [metrics.CategoricalCrossentropy(from_logits=True, axis=0)]},
     "the metric categorical_crossentropy may be of the batch as a whole"),
], ids=["crossentropy", "similarity", "metric"])
def test_losses_and_metrics_along_the_rows_are_those_of_the_batch(options, reason):
    targets = np.eye(3, dtype=np.float32)[Y]
    assert mirrored(4).explain(model_of(mirrored(1), **options), batch=(X, targets)).partitioned_because == reason
    one, four = (model_of(mirrored(count), **options).fit(X, targets, batch_size=16, shuffle=False, verbose=0).history
                 for count in (1, 4))
    for name, values in one.items():
        np.testing.assert_allclose(four[name], values, rtol=1e-5)


def weights(model):
    return jax.tree.map(np.asarray, model.state.params)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"module": Plain(normalizes=True)}, {"microbatches": 2}], ids=str)
def test_both_lowerings_have_the_same_numbers(options, monkeypatch):
    def trained(count):
        model = model_of(mirrored(count), **options)
        history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return history, weights(model), jax.tree.map(np.asarray, model.state.model_state)

    replicated = trained(4)
    monkeypatch.setattr("trainer.engine.model.core.model_core.why_not_replicated", lambda *args: "it is asked for")
    for found in (trained(4), trained(1)):
        for one, other in zip(jax.tree.leaves(replicated), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_a_summed_loss_without_rows_counts_once():
    def trained(count):
        model = model_of(mirrored(count), Weighted(), loss={
            "logits": CROSSENTROPY, "penalty": Penalty(reduction="sum", name="penalty")})
        targets = {"logits": Y, "penalty": np.zeros(len(Y), np.float32)}
        return model.fit(X, targets, batch_size=16, shuffle=False, verbose=0).history, weights(model)

    for one, other in zip(*(jax.tree.leaves(trained(count)) for count in (1, 4)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_a_head_without_the_axis_of_units_is_trained_with_one_row_for_each_replica():
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x).squeeze()

    def trained(count):
        model = model_of(mirrored(count), Head(), loss=losses.BinaryCrossentropy(from_logits=True))
        model.fit(X, Y > 0, batch_size=4, shuffle=False, verbose=0)
        return weights(model)

    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6),
                 trained(1), trained(4))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("options", "warns"), [({}, False), ({"make": OwnLoss}, True)])
def test_an_algorithm_that_a_partitioned_step_cannot_use_is_said_once(options, warns, recwarn):
    model = model_of(mirrored(4, cross_device_ops=distribute.RingAllReduce()), **options)
    for _ in range(2):
        model.fit(X, Y, batch_size=16, verbose=0)
    found = [str(warning.message) for warning in recwarn if "cross_device_ops" in str(warning.message)]
    assert len(found) == int(warns)
    if warns:
        assert "`compute_loss` may do anything with the batch" in found[0]


@pytest.mark.slow
def test_batches_that_do_not_divide_are_logged_too(caplog):
    model = model_of(mirrored(4))
    with caplog.at_level(logging.INFO, "trainer"):
        model.fit(X[:30], Y[:30], batch_size=16, verbose=0)
    assert caplog.messages.count("The train step is replicated.") == 1
    assert ("The train step is partitioned: the 14 rows of the batch do not divide by 4 replicas, so that each device "
            "computes all of them.") in caplog.messages


def test_an_error_in_a_replicated_step_has_the_rows_of_the_whole_batch():
    model = model_of(mirrored(4))
    with pytest.raises(ValueError, match=r"shape \(16,\).*\(16, 5, 2\)") as caught:
        model.fit(X, np.zeros((len(X), 5, 2), np.float32), batch_size=16, verbose=0)
    assert "(4, 5" not in str(caught.value)


def test_what_a_step_gathers_is_logged_once_with_its_bytes(caplog):
    class Sorted(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return jnp.sort(y_pred, axis=0)[: len(y_pred) // 2].mean()

    model = model_of(mirrored(4), make=Sorted)
    with caplog.at_level(logging.INFO, "trainer"):
        for _ in range(2):
            model.fit(X, Y, batch_size=16, verbose=0)
    assert len([message for message in caplog.messages if re.search(r"Each train step gathers \d+ B of", message)]) == 1


@pytest.mark.slow
def test_what_gathers_nothing_is_not_logged(caplog):
    with caplog.at_level(logging.INFO, "trainer"):
        model_of(mirrored(4), make=OwnLoss, module=Plain(drops=True)).fit(X, Y, batch_size=16, verbose=0)
    assert not any("gathers" in message for message in caplog.messages)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_batches_smaller_than_the_number_of_devices_are_cut_to_their_rows(rows):
    shapes = []

    class Noting(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            shapes.append(len(x))
            return super().compute_loss(x, y, y_pred, sample_weight)

    def trained(count):
        model = model_of(mirrored(count), make=Noting)
        history = model.fit(X[:rows], Y[:rows], batch_size=8, epochs=2, verbose=0).history
        return history["loss"], weights(model), model.predict(X[:rows], verbose=0)

    one, four = trained(1), trained(4)
    for expected, found in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert set(shapes) == {rows}


def groups_normalized(x, groups):
    rows = x.reshape(groups, -1, x.shape[-1])
    return ((rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)).reshape(x.shape)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("drops", [False, True])
def test_statistics_of_single_replicas_are_the_same_in_both_lowerings(drops):
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x, training: bool = False):
            x = nn.BatchNorm(use_running_average=not training, momentum=0.0, use_scale=False, use_bias=False)(x)
            return nn.Dropout(1e-9 if drops else 0.0, deterministic=not training)(x)

    model = model_of(mirrored(4), Norm(), loss="mse", batch_norm="per_replica")
    loss = model.fit(X, 0 * X, batch_size=32, shuffle=False, verbose=0).history["loss"][0]
    np.testing.assert_allclose(loss, np.square(groups_normalized(X, 4)).mean(), rtol=1e-5)
    averages = model.state.model_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(averages["mean"], X.mean(0), atol=1e-6)
    np.testing.assert_allclose(averages["var"], X.reshape(4, 8, 6).var(1).mean(0), rtol=1e-5)


def test_a_method_that_is_set_on_the_model_is_the_users_own():
    model = model_of(mirrored(4))
    model.compute_loss = lambda x, y, y_pred, sample_weight: of_batch(y, y_pred)
    assert "`compute_loss`" in model.strategy.explain(model, batch=(X, Y)).partitioned_because


@pytest.mark.slow
def test_each_shape_of_a_batch_is_proved_by_itself():
    class MixesLongRows(nn.Module):
        @nn.compact
        def __call__(self, x):
            if x.shape[1] > 4:
                x = x - x.mean(0)
            return nn.Dense(3)(x.sum(1))

    def trained(count):
        model = model_of(mirrored(count), MixesLongRows())
        for length in (4, 5):
            model.fit(LONG[:, :length], Y[:16], batch_size=16, shuffle=False, verbose=0)
        return weights(model)

    for one, four in zip(jax.tree.leaves(trained(1)), jax.tree.leaves(trained(4)), strict=True):
        np.testing.assert_allclose(four, one, rtol=2e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("asked", ["number", "place", "strategy", "reduced"])
def test_a_module_that_asks_for_the_replicas_sees_one(asked):
    def trained(count):
        model = model_of(mirrored(count), Asks(asked))
        return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]

    np.testing.assert_allclose(trained(4), trained(1), rtol=1e-5)
