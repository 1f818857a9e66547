"""Steps as users write them: each row of the tables in docs/modules_and_steps.md has a program here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops

import trainer
from tests.support.project_files import ROOT
from trainer import distribute, losses, metrics, regularizers

rng = np.random.default_rng(0)
X = rng.normal(size=(37, 4)).astype(np.float32)
Y = rng.normal(size=(37, 4)).astype(np.float32)
OUTPUT = nn.Dense(4, kernel_init=nn.initializers.ones)


def stepping(loss_of, log=None):
    """Returns a class of models whose `train_step` has a loss `(model, params, y, y_pred, model_state)`, and logs."""
    class Stepping(trainer.Model):
        def train_step(self, state, batch):
            x, y, _ = trainer.unpack_x_y_sample_weight(batch)

            def loss_fn(params):
                y_pred, model_state = self.apply(params, state, x, training=True)
                return loss_of(self, state, params, y, y_pred, model_state), (y_pred, model_state)

            (loss, (y_pred, model_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            logs = {"loss": loss} if log is None else log(self, loss, y, y_pred)
            return logs, state.apply_gradients(grads, model_state=model_state, value=loss)

    return Stepping


def losing(loss_of):
    """Returns a class of models whose `compute_loss` is a function `(y, y_pred)`."""
    class Losing(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return loss_of(y, y_pred)

    return Losing


def mean_square(y, y_pred):
    return jnp.square(y - y_pred).mean()


def fit(make, replicas, module=OUTPUT, rows=37, optimizer=None, loss="mse", before=lambda model: None, weights=None,
        **options):
    with distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)]).scope():
        model = make(module)
        model.compile(optimizer or optax.sgd(0.05), loss, **options)
    before(model)
    history = model.fit(X[:rows], Y[:rows], sample_weight=weights, batch_size=16, epochs=2, shuffle=False,
                        verbose=0).history
    state = jax.tree.map(np.asarray, (model.state.params, model.state.model_state))
    return {name: np.asarray(values) for name, values in history.items()}, state, model


def same(make, rows=37, **options):
    """Checks that four replicas give one device's numbers, and returns those."""
    one, four = fit(make, 1, rows=rows, **options), fit(make, 4, rows=rows, **options)
    for expected, found in zip(jax.tree.leaves(one[:2]), jax.tree.leaves(four[:2]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
    return one


def refused(error, match, make, replicas=1, **options):
    with pytest.raises(error, match=match):
        fit(make, replicas, **options)


def by_default(self, state, params, y, y_pred, model_state):
    return self.compute_loss(None, y, y_pred, None) + self.compute_penalties(params, model_state)


def tracker_of(model):
    model.mae = metrics.MeanAbsoluteError(name="mae")


def pairs(y, y_pred):
    return optax.softmax_cross_entropy_with_integer_labels(y_pred @ y.T, jnp.arange(len(y))).mean()


def any_loss():
    class Autoencoder(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return super().compute_loss(x, x, y_pred, sample_weight)

    def centered(y, y_pred):
        return jnp.square(y_pred - y_pred.mean(0)).mean(-1)

    for rows in (37, 29):  # last batches of 5 and 13 rows
        same(Autoencoder, rows=rows)
        same(stepping(lambda self, state, params, y, y_pred, model_state: mean_square(y, y_pred)), rows=rows)
        same(losing(pairs), rows=rows)
        same(trainer.Model, rows=rows, loss=centered, metrics=[centered])
    same(losing(lambda y, y_pred: jnp.square(y - y_pred).sum()), optimizer=optax.sgd(0.001))
    same(losing(mean_square), microbatches=2)


def loss_objects():
    huber = losses.Huber()
    same(stepping(lambda self, state, params, y, y_pred, model_state: huber(y, y_pred)), rows=29)
    same(losing(lambda y, y_pred: huber(y, y_pred) + 0.1 * losses.KLDivergence()(nn.softmax(y), nn.softmax(y_pred))))
    for repeated in (lambda rows: jnp.concatenate([rows, rows]), lambda rows: jnp.repeat(rows, 2, axis=0)):
        same(losing(lambda y, y_pred, repeated=repeated: huber(repeated(y), repeated(y_pred))), rows=29)
    weighted = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    same(losing(lambda y, y_pred: weighted(y, y_pred, sample_weight=y[:, 0] > 0)), rows=29)
    ignoring = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    same(losing(lambda y, y_pred: ignoring(y.argmax(-1), y_pred)), rows=29)
    same(losing(losses.MeanSquaredError(reduction="sum")), rows=32, optimizer=optax.sgd(0.001))


def furthest(y, y_pred):
    return jnp.abs(y - y_pred).max()


def loss_of_one_number():
    history = same(trainer.Model, loss=furthest, optimizer=optax.sgd(0.0))[0]
    expected = [np.abs(X[start:start + 16] @ np.ones((4, 4)) - Y[start:start + 16]).max() for start in (0, 16, 32)]
    np.testing.assert_allclose(history["loss"], [np.average(expected, weights=[16, 16, 5])] * 2, rtol=1e-5)
    refused(ValueError, "'furthest' returned values of shape.*one value per row", trainer.Model, loss=furthest,
            weights=np.ones(37))


def metric_of_one_number():
    history = same(trainer.Model, metrics=[furthest], optimizer=optax.sgd(0.0))[0]
    expected = [np.abs(X[start:start + 16] @ np.ones((4, 4)) - Y[start:start + 16]).max() for start in (0, 16, 32)]
    np.testing.assert_allclose(history["furthest"], [np.average(expected, weights=[16, 16, 5])] * 2, rtol=1e-5)
    refused(ValueError, "metric 'furthest' must return values of shape", trainer.Model, weighted_metrics=[furthest],
            weights=np.ones(37))


def metric_objects():
    def log(model, loss, y, y_pred):
        model.mae.update_state(y, y_pred)
        return {"loss": loss, "mae": model.mae.result()}

    history, _, _ = same(stepping(by_default, log), optimizer=optax.sgd(0.0), before=tracker_of)
    expected = np.abs(X @ np.ones((4, 4)) - Y).mean()
    np.testing.assert_allclose(history["mae"], [expected] * 2, rtol=1e-5)


def result_as_number():
    refused(TypeError, "used as a number", stepping(by_default, lambda model, *_: {"loss": 2 * model.mae.result()}),
            before=tracker_of)


def metric_under_grad():
    def loss_of(self, state, params, y, y_pred, model_state):
        self.mae.update_state(y, y_pred)
        return mean_square(y, y_pred)

    refused(TypeError, "JAX transforms.*has_aux", stepping(loss_of), before=tracker_of)


def own_state():
    def loss_of(self, state, params, y, y_pred, model_state):
        return mean_square(y, y_pred) + sum(map(jnp.sum, jax.tree.leaves(self.state.params)))

    refused(TypeError, "reads the state of a model.*regularizers", stepping(loss_of),
            before=lambda model: model.build(X[:1]))


def called():
    def loss_of(self, state, params, y, y_pred, model_state):
        return mean_square(y, self(y))

    refused(TypeError, r"self\.apply", stepping(loss_of))


def teacher():
    other = trainer.Model(nn.Dense(4))
    other.build(X[:1])

    def loss_of(self, state, params, y, y_pred, model_state):
        return mean_square(other.apply(other.state.params, other.state, y)[0], y_pred)

    applied, _ = same(stepping(loss_of), rows=35)[:2]
    called, _ = same(stepping(
        lambda self, state, params, y, y_pred, model_state: mean_square(self.teacher(y), y_pred)), rows=35,
        before=lambda model: setattr(model, "teacher", other))[:2]
    np.testing.assert_array_equal(called["loss"], applied["loss"])


def penalties():
    same(stepping(by_default), regularizers={"**/kernel": regularizers.L2(1e-1)})
    refused(ValueError, "compute_penalties", stepping(
        lambda self, state, params, y, y_pred, model_state: mean_square(y, y_pred)), regularizers={"kernel": "l2"})


def random_numbers():
    def loss_of(self, state, params, y, y_pred, model_state):
        return mean_square(y, y_pred + jax.random.normal(self.make_rng(state, "noise"), y.shape))

    history = same(stepping(loss_of), optimizer=optax.sgd(0.0))[0]
    assert history["loss"][0] != history["loss"][1]


def several_optimizers():
    class Two(trainer.Model):
        def sample_inputs(self, batch):
            x, _, _ = trainer.unpack_x_y_sample_weight(batch)
            return {"first": x, "second": x}

        def train_step(self, state, batch):
            x, y, _ = trainer.unpack_x_y_sample_weight(batch)

            def loss_fn(params):
                hidden, _ = self.apply(params["first"], state, x, module="first", training=True)
                return mean_square(y, self.apply(params["second"], state, hidden, module="second", training=True)[0])

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return {"loss": loss}, state.apply_gradients(first=grads["first"], second=grads["second"])

    same(Two, rows=35, module={"first": nn.Dense(4), "second": nn.Dense(4)}, loss=None,
         optimizer={"first": optax.sgd(0.05), "second": optax.adam(0.01)})


def asked_for():
    optimizer = optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, cooldown=0))
    same(stepping(by_default), optimizer=optimizer)


def kept_array():
    def log(model, loss, y, y_pred):
        model.last = y_pred
        return {"loss": loss}

    refused(TypeError, "keeps a traced array in `self.last`", stepping(by_default, log))


def numbers_of_python():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(1)(x)
            return jnp.full((len(x), 1), np.random.default_rng().normal())

    model = trainer.Model(Noise())
    first = model.predict(X, verbose=0)
    np.testing.assert_array_equal(first, model.predict(X, verbose=0))


class Keeps(nn.Module):
    """Keeps statistics of one kind."""

    kind: str

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.kind == "norm":
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        if self.kind in ("mean", "count"):
            state = self.variable("usage", self.kind, jnp.zeros, x.shape[-1:])
            if train and not self.is_initializing():
                state.value = 0.5 * (state.value + x.mean(0)) if self.kind == "mean" else state.value + x.sum(0)
        if self.kind == "losses":
            self.sow("losses", "activity", 0.1 * jnp.square(x).mean())
        self.sow("intermediates", "inputs", x)
        return nn.Dense(4, kernel_init=nn.initializers.ones)(x)


def batch_statistics():
    same(trainer.Model, module=Keeps("norm"))


def own_collection():
    for kind in ("mean", "count"):
        same(trainer.Model, module=Keeps(kind))
    count = same(trainer.Model, module=Keeps("count"), microbatches=2)[1][1]["usage"]["count"]
    np.testing.assert_allclose(count, 2 * X.sum(0), rtol=1e-4)


def sown_losses():
    history, _, model = same(trainer.Model, rows=35, module=Keeps("losses"), optimizer=optax.sgd(0.0))
    expected = np.square(X[:35] @ np.ones((4, 4)) - Y[:35]).mean() + 0.1 * np.square(X[:35]).mean()
    np.testing.assert_allclose(history["loss"], [expected] * 2, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(X[:35], Y[:35], verbose=0)["loss"], expected, rtol=1e-5)


def overwritten():
    dense = nn.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    model = same(trainer.Model, module=dense)[2]
    collection = model.state.model_state["_overwrite_with_gradient"]
    assert collection["Fp8DirectDotGeneralOp_0"]["input_scale"] == pytest.approx(np.abs(X).max() / 448, rel=0.1)


def other_sown():
    model = fit(trainer.Model, 4, module=Keeps("nothing"))[2]
    assert model.state.model_state == {}
    assert model.apply(model.state.params, model.state, X)[1]["intermediates"]["inputs"][0].shape == X.shape


PROGRAMS = {
    "What state and other collections a module may have": {
        "BatchNorm's statistics": batch_statistics,
        "State of its own": own_collection,
        "Losses": sown_losses,
        "State that gradients overwrite": overwritten,
        "Other sown values": other_sown,
    },
    "What a step may look like": {
        "A loss of any kind": any_loss,
        "A loss object called": loss_objects,
        "A loss of `compile` that returns one number": loss_of_one_number,
        "A metric of `compile` that returns one number": metric_of_one_number,
        "Metric objects": metric_objects,
        "A result as a number": result_as_number,
        "A metric in a function that JAX transforms": metric_under_grad,
        "The model's own state from `self`": own_state,
        "The model called": called,
        "Another model's state": teacher,
        "Penalties of weights": penalties,
        "Random numbers": random_numbers,
        "Several optimizers": several_optimizers,
        "An argument that an optimizer needs": asked_for,
        "Numbers of Python, in modules too": numbers_of_python,
        "An array kept in an object": kept_array,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for programs in PROGRAMS.values() for row in programs])
def test_a_row_of_the_documents_tables_is_true(row):
    next(programs[row] for programs in PROGRAMS.values() if row in programs)()


@pytest.mark.parametrize("title", PROGRAMS)
def test_each_row_of_the_documents_tables_has_a_program(title):
    text = (ROOT / "docs" / "modules_and_steps.md").read_text()
    table = text.partition(f"## {title}")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[1:] == list(PROGRAMS[title])


class ReturnsTheOldState(trainer.Model):
    def train_step(self, state, batch):
        logs, _ = super().train_step(state, batch)
        return logs, state


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_step_that_returns_the_state_that_it_was_given_is_warned_of(eager):
    model = ReturnsTheOldState(nn.Dense(4))
    model.compile("adam", "mse", run_eagerly=eager)
    with pytest.warns(UserWarning, match="returned the state that it was given, so nothing is trained"):
        model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_a_step_that_is_not_to_train_is_not_warned_of():
    class OnlyState(trainer.Model):
        def train_step(self, state, batch):
            logs, new = super().train_step(state, batch)
            return logs, state.replace(model_state=new.model_state)

    class Statistics(nn.Module):
        @nn.compact
        def __call__(self, x, training):
            return nn.Dense(4)(nn.BatchNorm(use_running_average=not training)(x))

    model = OnlyState(Statistics())
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)

    frozen = ReturnsTheOldState(nn.Dense(4))
    frozen.trainable = False
    frozen.compile("sgd", "mse")
    frozen.fit(X, Y, verbose=0)


class WithTraining(trainer.Model):
    """Keras's signature."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss if training else loss + 100.0


class WithoutTraining(trainer.Model):
    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)


@pytest.mark.slow
def test_compute_loss_knows_whether_it_is_for_training_if_it_asks():
    logs = {}
    for cls in (WithTraining, WithoutTraining):
        model = cls(nn.Dense(1, kernel_init=nn.initializers.zeros))
        model.compile(optax.sgd(0.0), "mse")
        x, y = np.ones((4, 2), np.float32), np.full((4, 1), 2.0, np.float32)
        logs[cls] = model.fit(x, y, validation_data=(x, y), verbose=0).history
    assert logs[WithTraining] == {"loss": [4.0], "val_loss": [104.0]}
    assert logs[WithoutTraining] == {"loss": [4.0], "val_loss": [4.0]}
    assert float(model.compute_loss(None, y, y, None)) == 0.0
