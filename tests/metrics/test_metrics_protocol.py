"""Metrics of a user's own: variables, eager updates, and their pure form in compiled steps and threads."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.waiting import GUARD_SECS
from trainer import metrics
from trainer.metrics import Metric
from trainer.metrics.variable import Variable


class KerasStyle(metrics.Metric):
    def __init__(self, name="keras_style", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")
        self.errors = [metrics.MeanAbsoluteError()]

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = jnp.abs(y_true - y_pred)
        if sample_weight is not None:
            values = jnp.multiply(values, sample_weight)
        self.total.assign(self.total + jnp.sum(values))
        self.count.assign_add(len(values))
        self.errors[0].update_state(y_true, y_pred, sample_weight)

    def result(self):
        return {"mean": jnp.divide(self.total, self.count), "total": self.total, "mae": self.errors[0].result()}


def test_a_subclass_written_for_keras_works_eagerly_and_compiled():
    metric = KerasStyle()
    assert len(metric.variables) == 4
    y_true, y_pred = np.zeros(4, "float32"), np.arange(4, dtype="float32")
    expected = {"mean": 1.5, "total": 6.0, "mae": 1.5}
    assert {key: float(value) for key, value in metric(y_true, y_pred).items()} == expected

    variables = jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), y_true, y_pred)
    result = jax.jit(metric.stateless_result)(variables)
    assert {key: float(value) for key, value in result.items()} == expected
    assert float(metric.total) == 6.0
    metric.reset_state()
    assert [float(variable) for variable in metric.variables] == [0.0] * 4


def test_a_variable_before_super_init_is_refused():
    class Early(metrics.Metric):
        def __init__(self):
            self.add_variable()

    with pytest.raises(RuntimeError, match=r"Call `super\(\).__init__\(\)` first in the `__init__` of Early"):
        Early()


def test_an_update_that_raises_leaves_values_as_they_were():
    class Failing(metrics.Mean):
        def update_state(self, values, sample_weight=None):
            super().update_state(values, sample_weight)
            raise RuntimeError("after the update")

    metric = Failing()
    with pytest.raises(RuntimeError, match="after the update"):
        jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), np.ones(3))
    assert [float(variable) for variable in metric.variables] == [0.0, 0.0]


def test_a_pure_update_is_not_seen_by_another_thread():
    inside, looked = threading.Event(), threading.Event()
    seen = []

    class Waiting(metrics.Mean):
        def update_state(self, values, sample_weight=None):
            super().update_state(values, sample_weight)
            inside.set()
            looked.wait(GUARD_SECS)

    metric = Waiting()
    zeros = metric.stateless_reset_state()
    thread = threading.Thread(target=lambda: seen.extend(metric.stateless_update_state(zeros, np.ones(3))))
    thread.start()
    assert inside.wait(GUARD_SECS)
    assert float(metric.total) == 0.0
    looked.set()
    thread.join()
    assert [float(value) for value in seen] == [3.0, 3.0]


@pytest.mark.slow
def test_variables_made_in_a_trace_outlive_it():
    metric = metrics.FBetaScore()
    jax.jit(lambda: metric.stateless_update_state([], jnp.eye(3), jnp.eye(3)))()
    assert [variable.shape for variable in metric.variables] == [(3,)] * 4
    np.testing.assert_array_equal(metric(np.eye(3), np.eye(3)), np.ones(3))


def test_variables_take_part_in_arithmetic():
    variable = metrics.Variable((2,), "ones", name="v")
    np.testing.assert_array_equal(variable.assign_sub([0.0, 3.0]), [1.0, -2.0])
    for received, expected in [
        (variable + variable, [2, -4]),
        (1 - variable, [0, 3]),
        (np.array([2.0, 2.0]) * variable, [2, -4]),
        (-variable, [-1, 2]),
        (abs(variable), [1, 2]),
        (variable[1], -2),
        (variable == 1, [True, False]),
        (variable >= 0, [True, False]),
        (jnp.square(variable), [1, 4]),
        (jnp.where(variable > 0, variable, 0), [1, 0]),
        (jnp.zeros_like(variable), [0, 0]),
        (jnp.zeros(variable.shape, variable.dtype), [0, 0]),
        (jax.jit(jnp.sum)(variable), -1),
        (np.asarray(variable), [1, -2]),
        (variable.numpy(), [1, -2]),
    ]:
        np.testing.assert_array_equal(received, expected)
    assert len(variable) == 2
    assert (variable.shape, variable.ndim, variable.dtype, variable.name) == ((2,), 1, "float32", "v")


class Counting(metrics.Metric):
    def __init__(self, increment):
        super().__init__(name="counting")
        self.n = 0
        self.rows = None
        self.total = self.add_weight(name="total")
        self._increment = increment

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows = y_pred.shape[0]  # what shapes have decided may be noted
        self.n += self._increment(y_pred)
        self.total.assign_add(jnp.sum(y_pred))

    def result(self):
        return self.total


@pytest.mark.parametrize("increment", [lambda y_pred: 1, jnp.mean])
def test_a_traced_update_that_counts_in_an_attribute_is_refused(increment):
    metric = Counting(increment)
    with pytest.raises(TypeError, match=r"`Counting.update_state` set `self.n`, .*`self.n.assign_add\(...\)`"):
        jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), jnp.ones(4), jnp.ones(4))
    assert metric.n == 0
    metric.update_state(jnp.ones(4), jnp.ones(4))  # which is not traced
    assert metric.n == 1


def test_a_traced_update_may_note_what_does_not_change():
    metric = Counting(lambda y_pred: 0)
    updated = jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), jnp.ones(4), jnp.ones(4))
    assert (float(updated[0]), metric.rows) == (4.0, 4)


def test_an_update_that_asks_for_the_value_of_a_traced_array_names_its_metric():
    metric = Counting(lambda y_pred: float(y_pred[0]))
    with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
        jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), jnp.ones(4), jnp.ones(4))
    assert "`update_state` of the metric 'counting'" in raised.value.__notes__[-1]


def test_a_name_in_the_place_of_a_shape_is_refused():
    with pytest.raises(TypeError, match=r"first argument .* is `shape`.*Write `name=\"wrong\"`"):
        metrics.Mean().add_weight("wrong", initializer="zeros")


class Composed(Metric):
    """A metric of others, which it keeps as `keep` puts them into its attributes."""

    def __init__(self, keep, name="composed", **kwargs):
        super().__init__(name=name, **kwargs)
        parts = metrics.MeanSquaredError(), metrics.MeanAbsoluteError()
        self.kept, self.parts = keep(parts), lambda: parts

    def update_state(self, y_true, y_pred, sample_weight=None):
        for part in self.parts():
            part.update_state(y_true, y_pred, sample_weight)

    def result(self):
        return sum(part.result() for part in self.parts())


@pytest.mark.parametrize("keep", [list, lambda parts: {"a": parts[0], "b": [parts[1]]}, lambda parts: [{"a": parts}],
                                  lambda parts: [*parts, {"again": parts}]])
def test_metrics_in_lists_and_dicts_are_part_of_a_metric(keep):
    metric = Composed(keep)
    assert len(metric.variables) == 4  # each once
    y_true, y_pred = np.ones((4, 1), np.float32), np.full((4, 1), 3.0, np.float32)
    values = jax.jit(metric.stateless_update_state)(metric.stateless_reset_state(), y_true, y_pred)
    assert float(metric.stateless_result(values)) == 4.0 + 2.0


def test_variables_in_lists_and_dicts_are_part_of_a_metric():
    metric = metrics.Mean()
    metric.more = {"a": [Variable(name="one"), Variable(name="two")]}
    assert [variable.name for variable in metric.variables] == ["total", "count", "one", "two"]


def test_an_update_of_a_variable_that_is_not_the_metrics_is_refused():
    elsewhere = metrics.Mean()

    class Lossy(metrics.Mean):
        def update_state(self, *args):
            elsewhere.update_state(1.0)

    with pytest.raises(TypeError, match=r"`Lossy.update_state` updates a variable that is not among .*attribute"):
        Lossy().stateless_update_state([0.0, 0.0], 1.0)


def test_a_variable_may_begin_with_the_numbers_of_an_array():
    given = np.arange(4.0).reshape(2, 2)
    assert np.asarray(metrics.Mean().add_variable((2, 2), given)).tolist() == given.tolist()
    with pytest.raises(ValueError, match=r"array of shape \(2, 2\), and its `shape` is \(3,\)"):
        Variable((3,), given)
