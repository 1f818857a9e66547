"""`trainer.testing`: what it compares, and what it says."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored
from trainer.core import precision
from trainer.distribute import MirroredStrategy, OneDeviceStrategy
from trainer.testing import assert_strategies_equal

X = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
Y = 2 * X.sum(axis=1, keepdims=True)
ONE, TWO = "OneDeviceStrategy(cpu:0)", "MirroredStrategy(cpu:0, cpu:1)"


def two():
    return mirrored(2)


def build(kind=trainer.Model, loss="mse", **options):
    """Returns a compiled model that compiles fast."""
    model = kind(nn.Dense(1, kernel_init=nn.initializers.ones))
    model.compile("sgd", loss, steps_per_execution=1, **options)
    return model


def failure(build=build, strategies=(two,), error=AssertionError, data=(X, Y), **options):
    """Returns what a comparison that fails says."""
    with pytest.raises(error) as raised:
        assert_strategies_equal(build, data, strategies, **options)
    return str(raised.value)


def trains_to(logs=dict, weight=lambda replicas: 2.0):
    """Returns a `train` that compiles nothing: it sets weights and returns logs that depend on the replicas."""
    def train(strategy, model, data):
        replicas = strategy.num_replicas_in_sync
        model.build(data[0])
        model.set_weights([np.full(leaf.shape, weight(replicas)) for leaf in model.get_weights()])
        return logs(replicas) if logs is not dict else {}

    return train


def log_failure(one_device, replicas, **options):
    """Returns what is said of a log that has one value on one device and another on two."""
    train = trains_to(lambda number: {"loss": one_device if number == 1 else replicas})
    return failure(train=train, evaluate=False, predict=False, **options)


# --- what is compared -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_trained_evaluated_and_asked_for_predictions_under_each_strategy():
    calls = []

    class Recorder(trainer.Model):
        def fit(self, x, y, **options):
            calls.append(("fit", self.strategy.num_replicas_in_sync, options["batch_size"], options["epochs"]))
            np.testing.assert_array_equal(options["sample_weight"], np.arange(7))
            return super().fit(x, y, **options)

        def evaluate(self, x, y, **options):
            calls.append(("evaluate", self.strategy.num_replicas_in_sync, options["batch_size"]))
            np.testing.assert_array_equal(options["sample_weight"], np.arange(7))
            return super().evaluate(x, y, **options)

        def predict(self, x, **options):
            calls.append(("predict", self.strategy.num_replicas_in_sync, options["batch_size"]))
            return super().predict(x, **options)

    assert_strategies_equal(lambda: build(Recorder, weighted_metrics=["mae"]), (X, Y, np.arange(7)),
                            [two, OneDeviceStrategy("cpu:5")], batch_size=4, epochs=2)
    assert calls == [call for replicas in (1, 2, 1) for call in (
        ("fit", replicas, 4, 2), ("evaluate", replicas, 4), ("predict", replicas, 4))]


@pytest.mark.slow
def test_a_model_without_a_loss_is_not_evaluated_and_may_have_no_targets():
    class Unsupervised(trainer.Model):
        def train_step(self, state, batch):
            return {}, state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))

        def predict_step(self, state, batch):
            raise AssertionError("not asked for")

    assert_strategies_equal(lambda: build(Unsupervised, loss=None), X, [two])
    with pytest.raises(AssertionError, match="not asked for"):
        assert_strategies_equal(lambda: build(Unsupervised, loss=None), X, [two], predict=True)


@pytest.mark.slow
def test_a_sum_of_gradients_in_place_of_their_mean_is_found_in_weights_and_in_what_follows():
    class Summed(trainer.Model):
        def train_step(self, state, batch):
            x, y, _ = trainer.unpack_x_y_sample_weight(batch)
            loss, grads = jax.value_and_grad(
                lambda params: self.compute_loss(x, y, self.apply(params, state, x)[0], None))(state.params)
            summed = jax.tree.map(lambda grad: grad * self.strategy.mesh.size, grads)
            return {"loss": loss}, state.apply_gradients(summed)

    message = failure(lambda: build(Summed), epochs=2, batch_size=7)
    assert message.startswith(f"{TWO} does not give the numbers of {ONE}.\n")
    lines = re.findall(r"^  (.+) differs by up to ([\d.e+-]+)( at \([\d, ]+\))?, where ([\d.e+-]+) is tolerated\.$",
                       message, re.MULTILINE)
    assert [name for name, *_ in lines] == [
        "weight 'bias'", "weight 'kernel'", "log 'loss' of epoch 2", "evaluated 'loss'", "prediction"]

    def trained(rate):
        kernel, bias = np.ones((3, 1)), np.zeros(1)
        for _ in range(2):
            error = 2 * (X @ kernel + bias - Y) / len(X)
            kernel, bias = kernel - rate * X.T @ error, bias - rate * error.sum()
        return kernel

    difference = np.abs(trained(0.02) - trained(0.01))
    _, largest, place, tolerated = lines[1]
    assert float(largest) == pytest.approx(difference.max(), rel=1e-2)
    assert place == f" at ({difference.argmax()}, 0)"
    assert float(tolerated) == pytest.approx(1e-5 + 1e-4 * np.abs(trained(0.01))[difference.argmax()], rel=1e-2)


@pytest.mark.slow
def test_logs_and_outputs_that_depend_on_the_number_of_devices_are_found():
    class Wrong(trainer.Model):
        def train_step(self, state, batch):
            return {"rows": jnp.float32(len(batch[0]) / self.strategy.mesh.size)}, state.replace(step=state.step + 1)

        def test_step(self, state, batch):
            return {"id": jnp.float32((self.strategy.mesh.size - 1) / 2)}

        def predict_step(self, state, batch):
            outputs = super().predict_step(state, batch)
            rows = len(outputs)
            devices = jnp.arange(rows) * self.strategy.mesh.size // rows
            return {"good": outputs, "bad": outputs + devices[:, None]}

    message = failure(lambda: build(Wrong), data=(X[:6], Y[:6]))
    assert re.findall(r"^  (.*) differs by up to (\S+?)(?: at \([345], 0\))?,", message, re.MULTILINE) == [
        ("log 'rows' of epoch 1", "3"), ("evaluated 'id'", "0.5"), ("prediction 'bad'", "1")]


@pytest.mark.slow
def test_every_strategy_that_fails_is_named_and_no_other():
    train = trains_to(weight=lambda replicas: 2.0 if replicas in (1, 2) else 3.0)
    message = failure(strategies=[lambda: mirrored(3), two, lambda: mirrored(4)], train=train)
    assert re.findall(r"(\S+\(.*\)) does not give", message) == [
        "MirroredStrategy(cpu:0, cpu:1, cpu:2)", "MirroredStrategy(cpu:0, cpu:1, cpu:2, cpu:3)"]


@pytest.mark.slow
def test_the_reference_can_be_chosen():
    train = trains_to(weight=lambda replicas: float(replicas))
    assert f"{ONE} does not give the numbers of {TWO}." in failure(
        strategies=[OneDeviceStrategy], reference=two, train=train)
    assert_strategies_equal(build, (X, Y), [two], reference=two, train=train)


@pytest.mark.slow
def test_weights_that_differ_before_training_are_told_apart():
    seeds = itertools.count()

    def build():
        model = trainer.Model(nn.Dense(1), seed=next(seeds))
        model.compile("sgd", "mse")
        return model

    message = failure(build)
    assert message.startswith(f"{TWO} does not give the numbers of {ONE}. They differ before training already: `build` "
                              "must make the same weights each time. Give `Model` a fixed seed")
    assert re.findall(r"^  (.*) differs by", message, re.MULTILINE) == ["weight 'kernel'"]


def test_copies_that_differ_between_devices_are_found():
    def train(strategy, model, data):
        model.build(data[0])
        kernel = model.state.params["kernel"]
        copies = [jax.device_put(np.full((3, 1), float(number)), device)
                  for number, device in enumerate(strategy.mesh.devices.flat)]
        apart = jax.make_array_from_single_device_arrays((3, 1), kernel.sharding, copies)
        model.state = model.state.replace(params={**model.state.params, "kernel": apart})
        return {}

    assert "\n  weight 'kernel' differs between devices that should hold copies of it." in failure(
        train=train, evaluate=False, predict=False)


@pytest.mark.slow
def test_an_optimizer_may_keep_a_random_key():
    def noisy():
        model = trainer.Model(nn.Dense(1))
        model.compile(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "mse", steps_per_execution=1)
        return model

    assert_strategies_equal(noisy, (X, Y), [two], train=trains_to(), evaluate=False, predict=False)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("one_device", "replicas", "said"), [
    (1.0, 1.5, "log 'loss' differs by up to 0.5, where 0.00011 is tolerated."),
    ([1.0, 2.0], [1.0, 1.0], "log 'loss' of epoch 2 differs by up to 1, where 0.00021 is tolerated."),
    ([1.0, 2.0], [1.0], "log 'loss' of epoch 2 is missing."),
    ([1.0], [1.0, 2.0], "log 'loss' of epoch 2 is not there under the reference."),
    (np.zeros(3), np.array([0, 0.25, -0.5]), "log 'loss' differs by up to 0.5 at (2,), where 1e-05 is tolerated."),
    (np.zeros(3), np.zeros(2), "log 'loss' has shape (2,) instead of (3,)."),
    (1.0, float("nan"), "log 'loss' differs by up to inf, where 0.00011 is tolerated."),
    (float("inf"), 1.0, "log 'loss' differs by up to inf, where 1e-05 is tolerated."),
    (float("inf"), -float("inf"), "log 'loss' differs by up to inf, where 1e-05 is tolerated."),
    (jnp.bfloat16(1), jnp.bfloat16(2), "log 'loss' differs by up to 1, where 0.00011 is tolerated."),
    (3 + 4j, 3.0, "log 'loss' differs by up to 4, where 0.00051 is tolerated."),
])
def test_differences_are_told_by_quantity_size_and_place(one_device, replicas, said):
    assert log_failure(one_device, replicas) == f"{TWO} does not give the numbers of {ONE}.\n  {said}"


@pytest.mark.slow
def test_equal_infinities_and_nans_and_differences_within_the_tolerance_pass():
    logs = lambda replicas: {"same": np.array([np.inf, np.nan]), "near": 10 + 0.1 * replicas, "none": np.zeros(0)}
    train = trains_to(logs)
    assert_strategies_equal(build, (X, Y), [two], train=train, rtol=0.01)
    assert_strategies_equal(build, (X, Y), [two], train=train, rtol=0, atol=0.11)
    assert "log 'near'" in failure(train=train, rtol=0, atol=0.09)


@pytest.mark.slow
def test_the_default_tolerance_is_that_of_how_float32_is_multiplied(monkeypatch):
    def train(strategy, model, data):
        return {**trains_to()(strategy, model, data), "near": 1 + 4e-3 * (strategy.num_replicas_in_sync > 1)}

    assert "log 'near'" in failure(train=train)
    monkeypatch.setattr(precision, "multiplies_float32", lambda platform, name: name == "highest")
    assert_strategies_equal(build, (X, Y), [two], train=train)
    exact = lambda: build(matmul_precision="highest")
    assert "log 'near'" in failure(build=exact, train=train)
    assert "log 'near'" in failure(train=train, rtol=1e-4, atol=0)


def test_only_so_many_differences_are_shown():
    train = trains_to(lambda replicas: {f"log{number}": replicas for number in range(20)})
    lines = failure(train=train).splitlines()
    assert len(lines) == 10 and lines[-1] == "  ... (20 in all)"


def test_weights_that_are_not_finite_compare_with_nothing():
    message = failure(train=trains_to(weight=lambda replicas: float("nan")))
    assert message == (f"Under {ONE}, weight 'bias' is not finite after training, so it compares with nothing. Lower "
                       "the learning rate, or train for fewer epochs.")


# --- what is refused --------------------------------------------------------------------------------------------------

MADE_BEFORE = trainer.Model(nn.Dense(1))


def uncompiled():
    return trainer.Model(nn.Dense(1))


def changes_nothing(strategy, model, data):
    model.state = model.state
    return {}


def built():
    model = build()
    model.build(X)
    return model


@pytest.mark.parametrize(("error", "said", "arguments"), [
    (TypeError, "`build` must be a function that makes and compiles a model.*type Model", {"build": MADE_BEFORE}),
    (TypeError, "`build` must return a `trainer.Model`. Received: a value of type NoneType", {"build": lambda: None}),
    (RuntimeError, r"Call `compile\(optimizer, loss\)` before `fit`", {"build": uncompiled}),
    (ValueError, r"made under Strategy\(cpu:0\), not under OneDeviceStrategy\(cpu:0\). Make it inside of `build`",
     {"build": lambda: MADE_BEFORE}),
    (ValueError, "`strategies` is empty. Give at least one", {"strategies": []}),
    (TypeError, "`strategies` must be a list of strategies.*type function", {"strategies": two}),
    (TypeError, r"`strategies\[1\]` must be a strategy, or a function.*type str", {"strategies": [two, "mirrored"]}),
    (TypeError, r"`strategies\[0\]` must be a strategy.*type NoneType", {"strategies": [lambda: None]}),
    (TypeError, "`reference` must be a strategy.*type int", {"reference": 1}),
    (ValueError, "`rtol` must be a number of at least 0. Received: rtol=-1", {"rtol": -1}),
    (ValueError, "`atol` must be a number of at least 0. Received: atol=nan", {"atol": float("nan")}),
    (ValueError, "`epochs` must be a whole number of at least 1. Received: epochs=0", {"epochs": 0}),
    (TypeError, r"`data` must be `\(x, y\)`.*Received: generator. For other data, give `train`",
     {"data": (row for row in X)}),
    (TypeError, "`train` must be a function that returns a dict of logs.*type NoneType",
     {"train": lambda strategy, model, data: None}),
    (TypeError, "`train` must return logs of numbers.*'loss' of type PerReplica. Reduce values of replicas by",
     {"train": trains_to(lambda replicas: {"loss": [trainer.distribute.PerReplica(jnp.ones(2))]})}),
    (TypeError, "must return logs of numbers.*'loss' of type str", {"train": trains_to(lambda _: {"loss": "1 m"})}),
    (ValueError, "`train` left the model without changed weights.*`model.state = state`",
     {"build": built, "train": changes_nothing}),
    (ValueError, "`train` left the model without changed weights", {"train": lambda strategy, model, data: {}}),
])
def test_wrong_arguments_are_refused_with_what_was_expected(error, said, arguments):
    assert re.search(said, failure(error=error, **arguments))


def test_a_model_that_was_returned_before_is_refused():
    strategy, models = mirrored(2), []

    def build_once():
        models[:] = models or [build()]
        return models[0]

    message = failure(build_once, [strategy], ValueError, reference=strategy, train=trains_to())
    assert "`build` returned a model that it returned before" in message


def test_an_error_tells_the_strategy_that_it_happened_under():
    def train(strategy, model, data):
        if isinstance(strategy, MirroredStrategy):
            raise KeyError("lost")
        return trains_to()(strategy, model, data)

    with pytest.raises(KeyError, match="lost") as raised:
        assert_strategies_equal(build, (X, Y), [two], train=train)
    assert raised.value.__notes__ == [
        f"In `assert_strategies_equal`, for the model that `build` makes under {TWO}."]


def test_the_module_is_an_attribute_of_the_package():
    assert trainer.testing.assert_strategies_equal is assert_strategies_equal
