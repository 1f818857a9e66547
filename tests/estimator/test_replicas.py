"""Estimators on several replicas and with sharded states compute what one device does, and a loop by hand."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.small_estimators import X, Y, dataset, spec_fn, trained_by_hand, variables
from trainer import estimator as est

INPUTS = {
    "a dataset": dataset,
    "a list": lambda: [(X[first:first + 2], Y[first:first + 2]) for first in (0, 2, 4)],
    "a generator": lambda: ((X[first:first + 2], Y[first:first + 2]) for first in (0, 2, 4)),
}


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, inputs, training=False):
        hidden = nn.BatchNorm(use_running_average=not training, momentum=0.9)(nn.Dense(4)(inputs))
        return nn.Dense(1)(hidden)


def on(tmp_path, strategy, model_fn, input_fn, **limits):
    config = est.RunConfig(tmp_path / type(strategy).__name__, train_distribute=strategy, eval_distribute=strategy)
    return est.Estimator(model_fn, config=config).train(input_fn, **limits)


@pytest.mark.sampled
@pytest.mark.parametrize("name", INPUTS)
def test_two_replicas_with_uneven_batches_train_as_a_loop_by_hand(tmp_path, devices, name):
    made = on(tmp_path, trainer.distribute.MirroredStrategy(devices[:2]), spec_fn(), INPUTS[name])
    kernel, bias = trained_by_hand([[0, 1, 2, 3], [4]])  # batches of 2, 2 and 1 rows, two to a step
    np.testing.assert_allclose(made.get_variable_value("params/kernel"), kernel, rtol=1e-5)
    np.testing.assert_allclose(made.get_variable_value("params/bias"), bias, rtol=1e-5)
    assert made.get_variable_value("global_step") == 2


@pytest.mark.slow
def test_replicas_go_on_over_the_end_of_repeated_data(tmp_path, devices):
    strategy = trainer.distribute.MirroredStrategy(devices[:2])
    made = on(tmp_path, strategy, spec_fn(), lambda: dataset(repeat=True), steps=3)
    kernel, _ = trained_by_hand([[0, 1, 2, 3], [4, 0, 1], [2, 3, 4]])
    np.testing.assert_allclose(made.get_variable_value("params/kernel"), kernel, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", trainer.losses.MeanSquaredError(reduction="sum")], ids=["mean", "sum"])
@pytest.mark.parametrize("kind", ["MirroredStrategy", "FullyShardedStrategy"])
def test_strategies_have_the_numbers_of_one_device_on_the_joined_batches(tmp_path, devices, kind, loss):
    model_fn = spec_fn(Normalized(), loss=loss)
    joined = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    one = on(tmp_path, trainer.distribute.OneDeviceStrategy(devices[0]), model_fn, lambda: joined)
    several = on(tmp_path, getattr(trainer.distribute, kind)(devices[:2]), model_fn, dataset)
    expected, found = variables(one), variables(several)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    logs, logs_of_one = several.evaluate(dataset), one.evaluate(dataset)
    np.testing.assert_allclose(logs["loss"], logs_of_one["loss"], rtol=1e-4)
    rows, rows_of_one = list(several.predict(dataset)), list(one.predict(dataset))
    np.testing.assert_allclose(rows, rows_of_one, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_loss_of_an_evaluation_is_the_mean_of_the_batches_on_any_number_of_replicas(tmp_path, devices):
    made = on(tmp_path, trainer.distribute.MirroredStrategy(devices[:2]), spec_fn(), dataset)
    kernel, bias = trained_by_hand([[0, 1, 2, 3], [4]])
    squares = np.square(X @ kernel + bias - Y)
    by_batch = [squares[:2].mean(), squares[2:4].mean(), squares[4:].mean()]
    assert made.evaluate(dataset)["loss"] == pytest.approx(np.mean(by_batch), rel=1e-4)
    assert made.evaluate(dataset, steps=1)["loss"] == pytest.approx(np.mean(by_batch[:2]), rel=1e-4)


@pytest.mark.slow
def test_a_head_weighs_rows_on_two_replicas_as_on_one(tmp_path, devices):
    head = est.RegressionHead(weight_column="weight")
    weight = np.array([[1.0], [0.0], [2.0], [0.5], [3.0]], np.float32)

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, features):
            return nn.Dense(1)(jnp.asarray(features["x"]))

    def model_fn(features, labels, mode):
        return head.create_estimator_spec(mode, Linear(), trainer.optimizers.SGD(0.05))

    def batches(*cuts):
        return [({"x": X[first:last], "weight": weight[first:last]}, Y[first:last])
                for first, last in itertools.pairwise(cuts)]

    one = on(tmp_path, trainer.distribute.OneDeviceStrategy(devices[0]), model_fn, lambda: batches(0, 4, 5))
    two = on(tmp_path, trainer.distribute.MirroredStrategy(devices[:2]), model_fn, lambda: batches(0, 2, 4, 5))
    for name, value in variables(one).items():
        np.testing.assert_allclose(variables(two)[name], value, rtol=1e-5, err_msg=name)
