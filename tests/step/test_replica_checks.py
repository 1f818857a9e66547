"""Code of the user's that computes other numbers on several replicas than on one device is refused, or equal."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import trainer
from trainer import distribute

rng = np.random.default_rng(0)
X = rng.normal(size=(48, 6)).astype(np.float32)
Y = rng.normal(size=(48, 3)).astype(np.float32)


def mirrored(replicas):
    return distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


def fit(make, replicas, module=None, rows=48, batch_size=16, **options):
    with mirrored(replicas).scope():
        model = make(module or nn.Dense(3))
        model.compile(optax.sgd(0.05), "mse", **options)
    history = model.fit(X[:rows], Y[:rows], batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    return model, history["loss"] + jax.tree.leaves(jax.tree.map(np.asarray, model.state.model_state))


def contrastive(y_pred):
    similarity = y_pred @ y_pred.T
    return optax.softmax_cross_entropy_with_integer_labels(similarity, jnp.arange(len(similarity))).mean()


class Contrastive(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return contrastive(y_pred)


class Gathered(trainer.Model):
    @distribute.on_global_batch
    def compute_loss(self, x, y, y_pred, sample_weight):
        return contrastive(y_pred)


class SumOfRows(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return jnp.square(y - y_pred).sum()


class Stepping(trainer.Model):
    """A step of one's own, with a loss given by a subclass."""

    def loss_of(self, y, y_pred):
        return jnp.square(y - y_pred).mean()

    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(params):
            y_pred, model_state = self.apply(params, state, x, training=True)
            return self.loss_of(y, y_pred), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return {"loss": loss}, state.apply_gradients(grads, model_state=model_state)


class Summed(trainer.Model):
    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(params):
            return self.compute_loss(x, y, self.apply(params, state, x, training=True)[0], None)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return {"loss": loss}, state.apply_gradients(grads, reduce="sum")


class SteppingContrastive(Stepping):
    def loss_of(self, y, y_pred):
        return contrastive(y_pred)


class SteppingGathered(Stepping):
    def loss_of(self, y, y_pred):
        return contrastive(distribute.get_replica_context().all_gather(y_pred))


class SteppingWithTracker(Stepping):
    """Logs what a metric accumulates from rows, which leaves padding out, and not the loss."""

    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)
        _, state = super().train_step(state, batch)
        tracker = trainer.metrics.Mean(name="loss")
        tracker.update_state(jnp.square(y - self.apply(state.params, state, x)[0]).mean(-1))
        return {"loss": tracker.result()}, state


class TrackedContrastive(SteppingWithTracker):
    def loss_of(self, y, y_pred):
        return contrastive(y_pred)


class SteppingByRow(Stepping):
    def loss_of(self, y, y_pred):
        context = distribute.get_replica_context()
        per_row = jnp.square(y - y_pred).mean(-1) * context.row_mask
        return per_row.sum() * context.num_replicas_in_sync / context.global_rows


@pytest.mark.slow
@pytest.mark.parametrize(("make", "named"), [
    (Contrastive, "compute_loss"), (SumOfRows, "compute_loss"), (SteppingContrastive, "train_step"),
    (Summed, "train_step"), (TrackedContrastive, "train_step")])
def test_a_loss_that_is_no_mean_over_rows_is_refused(make, named):
    fit(make, 1)
    with pytest.raises(ValueError, match=rf"`{named}` has other numbers on 4 replicas.*on_global_batch.*all_gather"):
        fit(make, 4)


def test_a_gradient_of_one_number_that_differs_is_named_with_its_values():
    class Sum(Stepping):
        def loss_of(self, y, y_pred):
            return jnp.square(y[:, :1] - y_pred).sum()

    with pytest.raises(ValueError, match=r"the gradient of 'bias' differs: -?[\d.]+ instead of -?[\d.]+\."):
        fit(Sum, 4, nn.Dense(1))


def clipped(grads):
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 0.1), grads)


def changing(change, reduces):
    """Returns a class of models whose `train_step` changes gradients, its replica's or those of the whole batch."""
    class Changing(trainer.Model):
        def train_step(self, state, batch):
            x, y, _ = trainer.unpack_x_y_sample_weight(batch)

            def loss_fn(params):
                return self.compute_loss(x, y, self.apply(params, state, x, training=True)[0], None)

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            if reduces:
                grads = distribute.get_replica_context().all_reduce("mean", grads)
            return {"loss": loss}, state.apply_gradients(change(grads), reduce=None if reduces else "mean")

    return Changing


@pytest.mark.slow
@pytest.mark.parametrize("change", [clipped, lambda grads: jax.tree.map(jnp.sign, grads)])
def test_gradients_of_a_replica_that_are_changed_are_refused_whatever_the_loss(change):
    with pytest.raises(ValueError, match=r"the gradient of.*Code that changes gradients.*reduce=None"):
        fit(changing(change, reduces=False), 4)
    one, four = (fit(changing(change, reduces=True), replicas) for replicas in (1, 4))
    np.testing.assert_allclose(four[1], one[1], rtol=1e-5)


@pytest.mark.slow
def test_gradients_that_are_rounding_alone_may_differ():
    class BeforeBatchNorm(nn.Module):
        @nn.compact
        def __call__(self, x, training: bool = False):  # the first bias has no effect
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not training)(nn.Dense(3)(1e3 * x)))

    one, four = (fit(changing(lambda grads: grads, reduces=False), replicas, BeforeBatchNorm()) for replicas in (1, 4))
    np.testing.assert_allclose(four[1][:2], one[1][:2], rtol=1e-4)


def draws(loss_of):
    """Returns a class of models whose `train_step` draws random numbers for the rows that it has."""
    class Draws(trainer.Model):
        def train_step(self, state, batch):
            x, y, _ = trainer.unpack_x_y_sample_weight(batch)
            key = self.make_rng(state, "noise")
            noise = jax.random.normal(key, (3, *x.shape))[1] + jax.random.gamma(key, 2.0, x.shape)

            def loss_fn(params):
                return loss_of(y, self.apply(params, state, x + 0.1 * noise, training=True)[0])

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return {"loss": loss}, state.apply_gradients(grads)

    return Draws


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, training: bool = False):
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not training)(x))


@pytest.mark.slow
def test_code_that_draws_random_numbers_is_compared_too():
    def mean(y, y_pred):
        return jnp.square(y - y_pred).mean()

    for wrong in (lambda y, y_pred: jnp.square(y - y_pred).sum(), lambda y, y_pred: contrastive(y_pred)):
        with pytest.raises(ValueError, match="`train_step` has other numbers on 4 replicas"):
            fit(draws(wrong), 4)
    fit(draws(mean), 4)
    with pytest.raises(ValueError, match="`train_step` has other numbers on 4 replicas"):
        fit(SteppingContrastive, 4, Dropping())
    fit(Stepping, 4, Dropping())
    fit(Stepping, 4, nnx.Sequential(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.3, rngs=nnx.Rngs(1))))


@pytest.mark.slow
def test_code_that_draws_from_keys_of_one_kind_only_trains():
    class Poisson(Stepping):
        def train_step(self, state, batch):
            jax.random.poisson(self.make_rng(state, "noise"), 2.0, (len(batch[0]),))  # has keys of JAX alone
            return super().train_step(state, batch)

    assert np.isfinite(fit(Poisson, 4)[1]).all()


class Centered(nn.Module):
    """Subtracts the mean over rows from what a layer gives."""

    mean: Callable
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, training: bool = False):
        x = nn.BatchNorm(use_running_average=not training)(nn.Dense(3)(x))
        x = nn.Dropout(self.rate, deterministic=not training)(x)
        return x - self.mean(x)


def spread_of_groups(x):
    return x.reshape(4, -1, 3).std(0).mean()


def mean_of_all(x):
    return distribute.get_replica_context().all_reduce("mean", x.mean(0))


@pytest.mark.slow
@pytest.mark.parametrize("module", [
    Centered(lambda x: x.mean(0)), Centered(lambda x: x.mean(0), rate=0.3), Centered(spread_of_groups)])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}])
def test_a_module_that_mixes_rows_is_refused_where_they_are_apart(module, options):
    fit(trainer.Model, 1, module)
    with pytest.raises(ValueError, match=r"outputs from other rows of the batch.*all_gather.*OneDeviceStrategy"):
        fit(trainer.Model, 1 if options else 4, module, **options)


@pytest.mark.slow
def test_a_module_that_mixes_rows_of_all_replicas_has_one_devices_numbers():
    for module in (Centered(mean_of_all), Centered(lambda x: 0.0)):
        for one, four in zip(fit(trainer.Model, 1, module)[1], fit(trainer.Model, 4, module)[1], strict=True):
            np.testing.assert_allclose(four, one, rtol=1e-4, atol=1e-6)
    with mirrored(4).scope():
        model = trainer.Model(Centered(lambda x: x.mean(0)))
        model.compile(loss="mse")
    with pytest.raises(ValueError, match="outputs from other rows"):
        model.evaluate(X, Y, verbose=0)
    with pytest.raises(ValueError, match="outputs from other rows"):
        model.predict(X, verbose=0)


class LogsNorm(trainer.Model):
    """Logs the norm of a replica's gradients, of which the mean over replicas is none of the whole batch."""

    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)

        def loss_fn(params):
            return self.compute_loss(x, y, self.apply(params, state, x, training=True)[0], None)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
        return {"loss": loss, "norm": norm}, state.apply_gradients(grads)


@pytest.mark.slow
def test_a_log_alone_that_is_no_mean_is_a_warning():
    with pytest.warns(UserWarning, match=r"the log 'norm' differs.*The gradients are those of one device"):
        _, four = fit(LogsNorm, 4)
    for expected, found in zip(fit(LogsNorm, 1)[1], four, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Gathered, Stepping, SteppingGathered, SteppingByRow])
def test_a_loss_that_sees_all_rows_or_is_a_mean_has_one_devices_numbers(make):
    for one, four in zip(fit(make, 1)[1], fit(make, 4)[1], strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [33, 35])  # the last batch has 1 row or 3, at most what a replica usually has
def test_a_small_uneven_batch_has_one_devices_numbers_whatever_a_step_does(rows):
    for make in (Stepping, Gathered):
        for one, four in zip(fit(make, 1, rows=rows)[1], fit(make, 4, rows=rows)[1], strict=True):
            np.testing.assert_allclose(four, one, rtol=1e-4)


@pytest.mark.slow
def test_a_step_that_counts_padding_is_refused():
    for make in (Stepping, SteppingWithTracker):
        with pytest.raises(ValueError, match=r"`train_step` counts rows that only pad.*row_mask"):
            fit(make, 4, rows=45)  # a last batch of 13
    for one, four in zip(fit(SteppingByRow, 1, rows=45)[1], fit(SteppingByRow, 4, rows=45)[1], strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-4)


def test_padding_is_refused_before_the_first_step_where_it_is_known_to_come():
    with mirrored(4).scope():
        model = Stepping(nn.Dense(3))
        model.compile(optax.sgd(0.05), "mse")
    with pytest.raises(ValueError, match="counts rows that only pad"):
        model.fit(X[:45], Y[:45], batch_size=16, verbose=0)
    assert int(model.state.step) == 0


def half(values):
    """Leaves padding out of the sum, and counts it in the mean."""
    return (values * distribute.get_replica_context().row_mask).mean()


def mean_of_replicas(values):
    """The mean over replicas of means over their real rows, of which they have different numbers."""
    mask = distribute.get_replica_context().row_mask
    return (values * mask).sum() / mask.sum()


def mean_over_rows(values):
    context = distribute.get_replica_context()
    return (values * context.row_mask).sum() * context.num_replicas_in_sync / context.global_rows


def by_rows(mean):
    class Loss(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return mean(jnp.square(y - y_pred).mean(-1))

    class Step(Stepping):
        def loss_of(self, y, y_pred):
            return mean(jnp.square(y - y_pred).mean(-1))

    return Loss, Step


class Sowing(nn.Module):
    mean: Callable

    @nn.compact
    def __call__(self, x):
        if not self.is_initializing():
            self.sow("losses", "activity", self.mean(jnp.square(x).mean(-1)))
        return nn.Dense(3)(x)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [half, mean_of_replicas])
def test_real_rows_that_count_otherwise_than_on_one_device_are_refused_with_the_mean_to_write(wrong):
    loss, step = by_rows(wrong)
    for make, module, named in ((loss, None, "overridden `compute_loss`"), (step, None, "overridden `train_step`"),
                                (trainer.Model, Sowing(wrong), "loss that the module sows")):
        with pytest.raises(ValueError, match=rf"{named} leaves out rows.* context\.num_replicas_in_sync / "):
            fit(make, 4, module, rows=45)
    with pytest.raises(ValueError, match=r"overridden `compute_loss` leaves out rows.*microbatches"):
        fit(loss, 1, microbatches=3)  # of 16 rows


@pytest.mark.slow
def test_the_mean_that_messages_advise_has_one_devices_numbers():
    loss, step = by_rows(mean_over_rows)
    sowing = Sowing(mean_over_rows)
    for make, module, replicas, options in (
            (loss, None, 4, {}), (step, None, 4, {}), (trainer.Model, sowing, 4, {}),
            (loss, None, 1, {"microbatches": 3}), (trainer.Model, sowing, 4, {"microbatches": 3})):
        for one, found in zip(fit(make, 1, module, rows=45)[1],
                              fit(make, replicas, module, rows=45, **options)[1], strict=True):
            np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [lambda h: 0.1 * jnp.square(h).sum(), lambda h: jax.nn.logsumexp(h @ h.T)])
def test_a_loss_that_is_sown_in_training_alone_is_compared_too(wrong):
    class SowsInTraining(nn.Module):
        @nn.compact
        def __call__(self, x, training: bool = False):
            h = nn.Dense(3)(nn.Dropout(0.2, deterministic=not training)(x))
            if training:
                self.sow("losses", "activity", wrong(h))
            return nn.BatchNorm(use_running_average=not training)(h)

    class SowsInNNX(nnx.Module):
        def __init__(self):
            self.dense, self.drop = nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            h = self.dense(x)
            if not self.drop.deterministic:
                self.sow("losses", "activity", wrong(h))
            return self.drop(h)

    for make in (SowsInTraining, SowsInNNX):
        fit(trainer.Model, 1, make())
        with pytest.raises(ValueError, match=r"loss that the module sows has other numbers on 4.*Let the module use"):
            fit(trainer.Model, 4, make())


@pytest.mark.slow
def test_a_module_may_ask_for_its_real_rows_wherever_it_is_called():
    with mirrored(4).scope():
        model = trainer.Model(Sowing(mean_over_rows))
        model.compile(optax.sgd(0.05), "mse", metrics=[Total()])
    model.fit(X[:45], Y[:45], batch_size=16, verbose=0)
    np.testing.assert_allclose(model(X), model.predict(X, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.apply(model.state.params, model.state, X)[0], model(X), rtol=1e-5)
    model.summary(print_fn=lambda line: None)


class Total(trainer.metrics.Metric):
    """A metric of the user's own, for which the outputs are looked at before the first step."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_variable(name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.total + jnp.sum(y_true))

    def result(self):
        return self.total.value


def test_a_global_batch_has_no_padding():
    with pytest.raises(ValueError, match=r"needs the whole batch.*drop_remainder"):
        fit(Gathered, 4, rows=45)
