"""Mistakes with which a model trains, to wrong numbers: each warns, and the corrected call does not."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, losses, metrics
from trainer.engine.step.crossed_rows import crosses_rows

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.float32)


class Net(nn.Module):
    layer: nn.Module
    ends_in: staticmethod = staticmethod(lambda x: x)

    @nn.compact
    def __call__(self, x, training=False):
        options = {nn.Dropout: {"deterministic": not training}, nn.BatchNorm: {"use_running_average": not training}}
        return self.ends_in(nn.Dense(1)(self.layer(x, **options.get(type(self.layer), {}))))


def applying(**arguments):
    """Returns a class of models whose `train_step` applies the module with these arguments."""
    class Applying(trainer.Model):
        def train_step(self, state, batch):
            x, y, _ = trainer.unpack_x_y_sample_weight(batch)

            def loss_fn(params):
                y_pred, model_state = self.apply(params, state, x, **arguments)
                return self.compute_loss(x, y, y_pred), model_state

            (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return {"loss": loss}, state.apply_gradients(grads, model_state=model_state)

    return Applying


def own_loss(y_true, y_pred):
    return optax.sigmoid_binary_cross_entropy(y_pred, y_true)


def messages_of_fit(kind, module, loss="mse", **compiled):
    model = kind(module)
    model.compile("sgd", loss, **compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)
    return [str(warning.message) for warning in caught]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm()])
def test_a_step_that_never_says_that_it_trains_warns(layer):
    message, = messages_of_fit(applying(), Net(layer))
    assert "`self.apply` without `training`" in message and "training=True" in message


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("arguments", "layer"), [
    ({"training": True}, nn.Dropout(0.5)),
    ({"training": False}, nn.Dropout(0.5)),
    ({}, nn.Dense(4)),
])
def test_a_step_that_says_it_does_not_warn_nor_does_a_module_without_difference(arguments, layer):
    assert messages_of_fit(applying(**arguments), Net(layer)) == []


@pytest.mark.sampled(3)
@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, {"precision": "bfloat16"}, {"remat": True}])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_step_that_drops_the_averages_of_batch_norm_warns(keeps, options):
    class Dropping(applying(training=True)):
        def train_step(self, state, batch):
            logs, new = super().train_step(state, batch)
            return logs, new if keeps else new.replace(model_state=state.model_state)

    messages = messages_of_fit(Dropping, Net(nn.BatchNorm()), **options)
    assert len(messages) == (0 if keeps else 1)
    assert keeps or "`train_step` leaves out the model state" in messages[0]


@pytest.mark.slow
def test_a_step_without_averages_may_leave_the_model_state_out():
    class Frozen(applying(training=True)):
        def train_step(self, state, batch):
            logs, new = super().train_step(state, batch)
            return logs, new.replace(model_state=state.model_state)

    assert messages_of_fit(Frozen, Net(nn.Dropout(0.5))) == []
    assert messages_of_fit(Frozen, Net(nn.BatchNorm()), freeze=["layer"]) == []


class OwnLoss(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return ((y - y_pred) ** 2).mean()


class OwnStep(trainer.Model):
    def train_step(self, state, batch):
        x, y, _ = trainer.unpack_x_y_sample_weight(batch)
        loss, grads = jax.value_and_grad(
            lambda params: optax.sigmoid_binary_cross_entropy(self.apply(params, state, x, training=True)[0], y).mean()
        )(state.params)
        return {"loss": loss}, state.apply_gradients(grads)


@pytest.mark.sampled(3)
@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "name"), [(OwnLoss, "compute_loss"), (OwnStep, "train_step")])
@pytest.mark.parametrize("labels", [Y[:, 0], Y[:, 0].astype(np.int32), Y])
def test_labels_that_are_compared_with_the_outputs_of_all_rows_warn(kind, name, labels):
    model = kind(nn.Dense(1))
    model.compile("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, labels, verbose=0)
    assert len(caught) == (labels.ndim == 1)
    assert labels.ndim == 2 or f"`{name}` combines labels of shape (rows,)" in str(caught[0].message)


@pytest.mark.parametrize(("function", "expected"), [
    (lambda y, p: (y - p) ** 2, True),
    (lambda y, p: jax.grad(lambda p: ((p - y) ** 2).mean())(p), True),
    (lambda y, p: jnp.where(y > 0, p, 0), True),
    (lambda y, p: jax.jit(lambda y, p: y.astype(jnp.bfloat16) * p)(y, p), True),
    (lambda y, p: jax.checkpoint(jnp.multiply)(y, p), True),
    (lambda y, p: y[:, None] - p, False),
    (lambda y, p: y - p[:, 0], False),
    (lambda y, p: (y == y[:, None]) * (p - p.T), False),
    (lambda y, p: y * (p ** 2).sum(), False),
    (lambda y, p: y @ p, False),
])
def test_rows_are_crossed_by_labels_as_a_row_beside_a_column_alone(function, expected):
    assert crosses_rows(jax.make_jaxpr(function)(Y[:, 0], Y), [True, False]) == expected


@pytest.mark.parametrize(("metric", "fix"), [
    ("accuracy", 'BinaryAccuracy(threshold=0.0, name="accuracy")'),
    (metrics.Recall(name="found"), 'Recall(thresholds=0.0, name="found")'),
])
def test_a_metric_that_splits_logits_at_one_half_warns_where_the_loss_is_the_users_own(metric, fix):
    message, = messages_of_fit(trainer.Model, Net(nn.Dense(4)), own_loss, metrics=[metric])
    assert "they look like logits" in message and fix in message


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("module", "loss", "metric"), [
    (Net(nn.Dense(4)), own_loss, metrics.BinaryAccuracy(threshold=0.0)),
    (Net(nn.Dense(4), nn.sigmoid), losses.log_cosh, "accuracy"),  # proven
    (Net(nn.Dense(4), lambda x: x.clip(0, 1)), own_loss, "accuracy"),  # seen
    (Net(nn.Dense(4)), "mse", "accuracy"),  # fits yes and no by 1 and 0
])
def test_a_metric_with_the_right_border_does_not_warn(module, loss, metric):
    assert messages_of_fit(trainer.Model, module, loss, metrics=[metric]) == []


def test_a_scope_without_with_warns():
    strategy = distribute.MirroredStrategy(["cpu:0"])
    with pytest.warns(RuntimeWarning, match="with strategy.scope"):
        strategy.scope()
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @strategy.scope()
        def strategy_of_model():
            return trainer.Model(nn.Dense(1)).strategy

        assert strategy_of_model() is strategy_of_model() is strategy
        with contextlib.ExitStack() as stack:
            assert stack.enter_context(strategy.scope()) is distribute.get_strategy() is strategy
        again = strategy.scope()
        for _ in range(2):
            with again, again:
                assert distribute.get_strategy() is strategy
            assert distribute.get_strategy() is not strategy
