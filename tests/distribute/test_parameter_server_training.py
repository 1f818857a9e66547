"""`fit` on parameter servers of this machine: the numbers of one device where they must be, and exact counts."""

from __future__ import annotations

import json

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import callbacks, distribute, estimator

pytestmark = pytest.mark.processes
rng = np.random.default_rng(0)
x = rng.normal(size=(90, 6)).astype(np.float32)
y = (x @ rng.normal(size=(6, 3))).argmax(-1)
LOSS = trainer.losses.SparseCategoricalCrossentropy(from_logits=True)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        x = nn.relu(nn.BatchNorm(use_running_average=not training)(nn.Dense(8)(x)))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not training)(x))


@pytest.fixture(scope="module")
def one_worker():
    with distribute.ParameterServerStrategy(num_workers=1, num_ps=2) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def cluster():
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=2) as strategy:
        yield strategy


def made(strategy, optimizer="adam", module=None, **options):
    with strategy.scope():
        model = trainer.Model(module or Net(), seed=0)
        model.compile(optimizer, LOSS, metrics=["accuracy"], **options)
    return model


def assert_same(model, expected, history, expected_history, atol=3e-5):
    assert set(history.history) == {*expected_history.history, "staleness"}
    for name, values in expected_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4, atol=atol, err_msg=name)
    received, wanted = jax.device_get((model.state, expected.state))
    for (path, leaf), other in zip(jax.tree.leaves_with_path(received), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("optimizer", [
    pytest.param("adam", marks=pytest.mark.every_case, id="adam"),
    pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.every_case, id="momentum"),
    pytest.param(trainer.optimizers.SGD(optax.exponential_decay(0.1, 5, 0.5)), marks=pytest.mark.every_case,
                 id="schedule"),
    pytest.param(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), marks=pytest.mark.every_case,
                 id="plateau")])
def test_one_worker_gives_the_numbers_of_one_device(one_worker, optimizer):
    def run(strategy):
        model = made(strategy, optimizer)
        return model, model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_data=(x, y))

    (model, history), (expected, expected_history) = run(one_worker), run(distribute.OneDeviceStrategy())
    assert_same(model, expected, history, expected_history)
    assert history.history["staleness"] == [0.0] * 3
    np.testing.assert_allclose(model.predict(x, verbose=0), expected.predict(x, verbose=0), atol=1e-3)


@pytest.mark.parametrize("options", [
    {"ema_decay": 0.9}, {"freeze": "Dense_0"}, {"microbatches": 2}, {"precision": "mixed_bfloat16"},
    {"regularizers": {"**/kernel": "l2"}}, {"steps_per_execution": 3}], ids=str)
def test_options_of_compile_do_what_they_do_on_one_device(one_worker, options):
    def run(strategy):
        model = made(strategy, optax.sgd(0.1), **options)
        return model, model.fit(x, y, batch_size=18, epochs=2, verbose=0)

    (model, history), (expected, expected_history) = run(one_worker), run(distribute.OneDeviceStrategy())
    assert_same(model, expected, history, expected_history, atol=1e-2 if "precision" in options else 3e-5)


def test_without_staleness_two_workers_give_the_numbers_of_one_device():
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=1, max_staleness=0) as strategy:
        model, expected = made(strategy), made(distribute.OneDeviceStrategy())
        history, expected_history = (each.fit(x, y, batch_size=16, epochs=2, verbose=0) for each in (model, expected))
        assert_same(model, expected, history, expected_history)


@pytest.mark.parametrize("most", [1, 3])
def test_staleness_is_at_most_twice_what_was_asked_for(most):
    seen = []

    class Watch(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["staleness"])

    with distribute.ParameterServerStrategy(num_workers=2, num_ps=1, max_staleness=most) as strategy:
        made(strategy, "sgd").fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Watch()], shuffle=False)
    assert len(seen) == 3 and max(seen) <= 2 * most


def as_dataset():
    return trainer.data.Dataset.from_arrays((x, y)).shuffle(seed=0).batch(16)


def as_generator():
    while True:
        for start in range(0, 90, 16):
            yield x[start:start + 16], y[start:start + 16]


@pytest.mark.parametrize(("data", "steps", "per_epoch"), [
    (as_dataset, None, 6), (lambda: as_dataset().repeat(), 7, 7), (as_generator, 5, 5),
    (lambda: as_dataset().map(lambda x, y: (x, y)), None, 6), (lambda: list(as_dataset()), None, 6)])
def test_as_many_updates_are_made_as_there_are_batches(cluster, data, steps, per_epoch):
    model = made(cluster)
    history = model.fit(data(), epochs=3, steps_per_epoch=steps, verbose=0)
    assert int(model.state.step) == 3 * per_epoch == int(model.state.opt_state.count)
    assert len(history.history["loss"]) == 3


def test_each_row_of_an_epoch_is_trained_once(cluster):
    """With gradients that are the rows themselves: their sum is known, whatever the order of the updates."""
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.zeros, (90,))

    with cluster.scope():
        model = trainer.Model(Sum())
        model.compile(optax.sgd(1.0), lambda y_true, y_pred: -y_pred * 10.0)
    model.fit(np.eye(90, dtype=np.float32), np.zeros(90), batch_size=10, epochs=4, verbose=0)
    np.testing.assert_allclose(model.state.params["w"], 4.0, rtol=1e-6)


@pytest.mark.every_case
def test_a_learning_rate_that_a_callback_sets_reaches_the_servers(one_worker):
    def run(strategy):
        model = made(strategy, trainer.optimizers.SGD(0.1))
        schedule = callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))
        return model, model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[schedule])

    (model, history), (expected, expected_history) = run(one_worker), run(distribute.OneDeviceStrategy())
    assert_same(model, expected, history, expected_history)


def test_weights_that_are_set_between_fits_are_those_that_train(one_worker):
    def run(strategy):
        model = made(strategy, optax.sgd(0.1))
        model.fit(x, y, batch_size=16, epochs=1, verbose=0)
        model.set_weights([0.5 * weight for weight in model.get_weights()])
        return model, model.fit(x, y, batch_size=16, epochs=1, verbose=0)

    (model, history), (expected, expected_history) = run(one_worker), run(distribute.OneDeviceStrategy())
    assert_same(model, expected, history, expected_history)


def test_callbacks_of_batches_are_told_of_groups_of_them(cluster):
    told = []

    class Watch(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            told.append((batch, float(logs["loss"])))

    model = made(cluster)
    model.fit(x, y, batch_size=10, epochs=1, verbose=0, callbacks=[Watch()])
    assert told[-1][0] == 8 and len(told) < 9


def test_training_stops_where_a_callback_or_a_limit_says(cluster):
    model = made(cluster)
    model.fit(x, y, batch_size=10, epochs=5, verbose=0, max_steps=13)
    assert int(model.state.step) == 13


class Adversaries(trainer.Model):
    """Two modules that are trained in one step."""

    def sample_inputs(self, batch):
        return {"one": batch[0], "other": batch[0]}

    def losses(self, params, state, batch):
        outputs = {name: self.apply(params[name], state, batch[0], module=name)[0] for name in ("one", "other")}
        return {"one": ((outputs["one"] - 1.0) ** 2).mean(), "other": ((outputs["other"] - outputs["one"]) ** 2).mean()}

    def train_step(self, state, batch):
        grads = {name: jax.grad(lambda params, name=name: self.losses(params, state, batch)[name])(state.params)[name]
                 for name in ("one", "other")}
        return {"loss": self.losses(state.params, state, batch)["one"]}, state.apply_gradients(**grads)


def adversaries(strategy, kind=Adversaries):
    with strategy.scope():
        model = kind({"one": nn.Dense(2), "other": nn.Dense(2)}, seed=0)
        model.compile({"one": optax.sgd(0.1), "other": optax.adam(0.1)})
    return model


def test_a_step_of_two_optimizers_gives_the_numbers_of_one_device(one_worker):
    def run(strategy):
        model = adversaries(strategy)
        return model, model.fit(x, y, batch_size=16, epochs=2, verbose=0)

    (model, history), (expected, expected_history) = run(one_worker), run(distribute.OneDeviceStrategy())
    assert_same(model, expected, history, expected_history)


class Twice(Adversaries):
    def train_step(self, state, batch):
        _, state = super().train_step(state, batch)
        return super().train_step(state, batch)


class ReadsUpdated(Adversaries):
    def train_step(self, state, batch):
        logs, state = super().train_step(state, batch)
        return {**logs, "norm": optax.tree.norm(state.params)}, state


@pytest.mark.parametrize(("kind", "message"), [
    (Twice, r"cannot (apply gradients twice|use them after `apply_gradients`)"),
    (ReadsUpdated, r"cannot use them after `apply_gradients`")])
def test_a_step_that_needs_updated_parameters_is_refused(cluster, kind, message):
    with pytest.raises(ValueError, match=message):
        adversaries(cluster, kind).fit(x, y, verbose=0)


@pytest.mark.parametrize(("options", "fix"), [
    ({"run_eagerly": True}, "OneDeviceStrategy"), ({"skip_non_finite": True}, "TerminateOnNaN"),
    ({"deterministic": True}, "synchronous strategy"),
    ({"precision": "mixed_float16"}, "mixed_bfloat16")], ids=str)
def test_options_that_workers_do_not_have_are_refused(cluster, options, fix):
    with pytest.raises(ValueError, match=f"cannot be used under ParameterServerStrategy.*{fix}"):
        made(cluster, **options).fit(x, y, verbose=0)


def test_an_optimizer_that_cannot_be_split_is_refused(cluster):
    with pytest.raises(ValueError, match=r"several arrays at once.*num_ps=1"):
        made(cluster, optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))).fit(x, y, verbose=0)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({}, distribute.ClusterError, "workers and parameter servers.*'ps', and RAY_AUTH_TOKEN_PATH.*num_workers=None"),
    ({"cluster_resolver": 3}, TypeError, "must be a TFConfigClusterResolver.*int"),
    ({"num_workers": 2}, distribute.ClusterError, "num_ps=None"),
    ({"num_workers": 0, "num_ps": 1}, ValueError, "num_workers"),
    ({"num_workers": 1, "num_ps": 1.5}, (TypeError, ValueError), "num_ps"),
    ({"num_workers": 1, "num_ps": 1, "max_staleness": -1}, ValueError, "max_staleness"),
    ({"num_workers": 1, "num_ps": 1, "staleness": "divide"}, ValueError, "'scale'"),
    ({"num_workers": 1, "num_ps": 1, "worker_timeout": 0}, ValueError, "worker_timeout"),
    ({"num_workers": 1, "num_ps": 1, "variable_partitioner": 3}, TypeError, "MinSizePartitioner"),
    ({"num_workers": 1, "num_ps": 1, "address": 6379}, TypeError, "address of a Ray cluster"),
])
def test_arguments_are_checked_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        distribute.ParameterServerStrategy(**arguments)


def test_a_run_that_was_interrupted_goes_on_exactly(one_worker, tmp_path):
    def fit(epochs, folder):
        model = made(one_worker)
        model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[
            callbacks.BackupAndRestore(folder, delete_checkpoint=False)])
        return model

    whole = fit(4, tmp_path / "whole")
    fit(2, tmp_path / "parts")
    parts = fit(4, tmp_path / "parts")
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((whole.state, parts.state)))


def test_estimators_train_on_parameter_servers(cluster, tmp_path):
    targets = x @ np.arange(6, dtype=np.float32)[:, None]

    def input_fn():
        return trainer.data.Dataset.from_arrays((x, targets)).batch(10).repeat()

    def model_fn(features, labels, mode):
        return estimator.EstimatorSpec(mode, module=nn.Dense(1), loss="mse", optimizer=optax.sgd(0.05))

    config = estimator.RunConfig(model_dir=str(tmp_path), train_distribute=cluster, save_checkpoints_steps=20)
    metrics, _ = estimator.train_and_evaluate(
        estimator.Estimator(model_fn, config=config), estimator.TrainSpec(input_fn, max_steps=60),
        estimator.EvalSpec(input_fn, steps=9, throttle_secs=0))
    assert metrics["global_step"] == 60 and metrics["loss"] < 5


def test_the_task_ps_of_an_estimator_serves_in_the_strategy(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({
        "cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "task": {"type": "ps", "index": 0}}))
    made = estimator.Estimator(lambda features, mode: None, config=estimator.RunConfig(model_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"serves where the script makes its strategy.*ParameterServerStrategy"):
        estimator.train_and_evaluate(made, estimator.TrainSpec(lambda: x, max_steps=1), estimator.EvalSpec(lambda: x))


def test_a_model_without_an_optimizer_runs_its_steps(one_worker):
    class Counted(trainer.Model):
        def train_step(self, state, batch):
            return {"rows": batch[0].sum() * 0 + 1.0}, state

    with one_worker.scope():
        model = Counted(nn.Dense(3))
        model.compile(None)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert history.history["rows"] == [1.0, 1.0] and int(model.state.step) == 12
