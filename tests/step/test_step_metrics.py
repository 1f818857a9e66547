"""Metric objects that a step of the user's updates: Keras's pattern, with the numbers of one device on any number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import distribute, metrics
from trainer.core import replica_context
from trainer.engine.step import step_metrics

rng = np.random.default_rng(0)
X = rng.normal(size=(53, 4)).astype(np.float32)
Y = rng.normal(size=(53, 1)).astype(np.float32)
X[48:] *= 10  # what is in an uneven last batch counts
LABELS = rng.integers(0, 3, (53, 1))


def mirrored(replicas):
    return distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


def gradients(model, state, batch):
    x, y, w = trainer.unpack_x_y_sample_weight(batch)

    def loss_fn(params):
        y_pred, model_state = model.apply(params, state, x, training=True)
        return model.compute_loss(x, y, y_pred, w), (y_pred, model_state)

    (loss, (y_pred, model_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return loss, y, y_pred, state.apply_gradients(grads, model_state=model_state)


class Trackers(trainer.Model):
    """As in Keras's guide to custom steps."""

    def __init__(self, module):
        super().__init__(module)
        self.loss_tracker = metrics.Mean(name="loss")
        self.mae = metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]

    def train_step(self, state, batch):
        loss, y, y_pred, state = gradients(self, state, batch)
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}, state

    def test_step(self, state, batch):
        x, y, w = trainer.unpack_x_y_sample_weight(batch)
        y_pred, _ = self.apply(state.params, state, x)
        self.loss_tracker.update_state(self.compute_loss(x, y, y_pred, w))
        self.mae.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class CompiledMetrics(trainer.Model):
    """As in Keras's guide: the metrics of `compile` by `self.metrics`, or one's own by an attribute."""

    def train_step(self, state, batch):
        loss, y, y_pred, state = gradients(self, state, batch)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}, state


class ByComputeMetrics(trainer.Model):
    """Updates the metrics of `compile` by `compute_metrics`, and asks the objects for their results."""

    def train_step(self, state, batch):
        loss, y, y_pred, state = gradients(self, state, batch)
        self.compute_metrics(None, y, y_pred, None)
        tracker, compiled = self.metrics
        tracker.update_state(loss)
        return {"loss": tracker.result(), **compiled.result()}, state


class InTheLoss(trainer.Model):
    """As in the docstring of Keras's `compute_loss`."""

    def __init__(self, module):
        super().__init__(module)
        self.tracker = metrics.Mean(name="tracked")

    def compute_loss(self, x, y, y_pred, sample_weight):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        self.tracker.update_state(loss)
        return loss


def fit(make, replicas, batch_size=16, **options):
    with mirrored(replicas).scope():
        model = make(nn.Dense(1, kernel_init=nn.initializers.ones))
        model.compile(optax.sgd(0.01), "mse", metrics=["mae"], **options)
    history = model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0,
                        validation_data=(X[:21], Y[:21])).history
    return {name: np.asarray(values) for name, values in history.items()}


# The last batch has 5 rows, which two replicas compute whole; of 23, it has 7, which pad.
@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "options"), [
    (2, {}), (4, {}), (4, {"batch_size": 23}), (1, {"run_eagerly": True})])
@pytest.mark.parametrize("make", [Trackers, CompiledMetrics, ByComputeMetrics, InTheLoss])
def test_metrics_of_a_step_have_one_devices_numbers(make, replicas, options):
    one = fit(make, 1, **{"batch_size": 16, **options, "run_eagerly": False})
    other = fit(make, replicas, **options)
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=2e-5, err_msg=name)


@pytest.mark.slow
def test_metrics_of_a_step_are_those_of_a_loop():
    history = fit(Trackers, 4)
    kernel, bias = np.ones((4, 1), np.float32), np.zeros(1, np.float32)
    for epoch in range(2):
        losses, errors = [], []
        for start in range(0, len(X), 16):
            x, y = X[start:start + 16], Y[start:start + 16]
            error = x @ kernel + bias - y
            losses.append(np.square(error).mean())
            errors.append(np.abs(error))
            kernel, bias = kernel - 0.01 * 2 * x.T @ error / len(x), bias - 0.01 * 2 * error.mean(0)
        # As in Keras, a scalar counts once for each batch, and a row once for each row.
        np.testing.assert_allclose(history["loss"][epoch], np.mean(losses), rtol=1e-4)
        np.testing.assert_allclose(history["mae"][epoch], np.concatenate(errors).mean(), rtol=1e-4)


@pytest.mark.slow
def test_the_names_of_logs_are_keras_names():
    assert list(fit(CompiledMetrics, 1)) == ["loss", "mae", "val_loss", "val_mae"]
    assert list(fit(InTheLoss, 1)) == ["loss", "mae", "tracked", "val_loss", "val_mae", "val_tracked"]


def test_metrics_exist_before_the_first_batch():
    model = Trackers(nn.Dense(1))
    model.compile("sgd", "mse")
    model.mae.update_state(Y, Y + 1)
    model.reset_metrics()
    assert float(model.mae.result()) == 0.0
    model = trainer.Model(nn.Dense(1))
    assert model.metrics == []
    model.compile("sgd", "mse", metrics=["mae"])
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics"]
    model.reset_metrics()


@pytest.mark.slow
def test_metric_objects_have_the_values_of_the_last_run():
    model = Trackers(nn.Dense(1))
    model.compile("sgd", "mse")
    history = model.fit(X, Y, verbose=0).history
    np.testing.assert_allclose(model.mae.result(), history["mae"][-1], rtol=1e-6)
    evaluated = model.evaluate(X, Y, verbose=0)["mae"]
    np.testing.assert_allclose(model.mae.result(), evaluated, rtol=1e-6)


class CategoricalTruePositives(metrics.Metric):
    """As in Keras's guide: with weights of shape (rows,) its values would broadcast to (rows, rows)."""

    def __init__(self, name="true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_weight(name="ctp", initializer="zeros", shape=())

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = jnp.reshape(jnp.argmax(y_pred, axis=1), (-1, 1))
        values = (y_true.astype("int32") == y_pred.astype("int32")).astype("float32")
        if sample_weight is not None:
            values = values * sample_weight
        self.true_positives.assign_add(jnp.sum(values))

    def result(self):
        return self.true_positives


def test_a_metric_of_the_users_sees_the_real_rows_of_a_padded_batch_one_by_one():
    metric, labels = CategoricalTruePositives(), jnp.array([[1], [2], [0], [0]])
    y_pred, mask = jnp.eye(3)[jnp.array([1, 0, 0, 0])], jnp.array([1.0, 1.0, 0.0, 0.0])
    with replica_context.enter(replica_context.ReplicaContext(rows=4, row_mask=mask)):
        (hits,) = step_metrics.updated(metric, metric.stateless_reset_state(), labels, y_pred)
    assert float(hits) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [16, 23, 53])
def test_a_metric_gets_no_weights_that_the_user_has_not_passed(batch_size):
    def counted(replicas):
        with mirrored(replicas).scope():
            model = trainer.Model(nn.Dense(3))
            model.compile(optax.sgd(0.0), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                          metrics=[CategoricalTruePositives()])
        return model.fit(X, LABELS, batch_size=batch_size, verbose=0).history["true_positives"]

    assert counted(4) == counted(1)


def refused(message, step, error=TypeError):
    class Refused(Trackers):
        def train_step(self, state, batch):
            loss, y, y_pred, state = gradients(self, state, batch)
            return {"loss": step(self, loss, y, y_pred)}, state

    model = Refused(nn.Dense(1))
    model.compile("sgd", "mse")
    with pytest.raises(error, match=message):
        model.fit(X, Y, verbose=0)


def test_a_result_is_no_number_in_a_step():
    def doubled(model, loss, y, y_pred):
        model.loss_tracker.update_state(loss)
        return 2 * model.loss_tracker.result()

    refused("metric 'loss' is used as a number in a step.*return it as a log", doubled)


def test_the_result_of_a_metric_that_a_step_has_not_updated_is_refused():
    refused("result of the metric 'mae', which it has not updated", lambda model, *_: model.mae.result(), ValueError)


def test_a_step_does_not_reset_metrics():
    refused("resets the metric 'mae'.*each epoch", lambda model, loss, *_: model.mae.reset_state())


def test_variables_of_metrics_are_not_used_in_a_step():
    refused("variable 'total' of a metric is used by itself", lambda model, loss, *_: model.mae.total.assign_add(loss))
    refused("variable 'total' of a metric is used by itself", lambda model, *_: model.mae.total / model.mae.count)


def test_a_metric_is_not_updated_where_jax_transforms():
    def inside(model, loss, y, y_pred):
        return jax.grad(lambda loss: model.loss_tracker.update_state(loss) or loss)(loss)

    refused("metric 'loss' is updated inside of a function that JAX transforms.*has_aux", inside)
