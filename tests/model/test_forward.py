"""The call of a model: compiled once for each shape, with the numbers of the module called operation by operation."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.networks import NNXMLP, LinenMLP, logits_loss, mirrored
from tests.support.strategy_cases import STRATEGIES

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
Y = np.arange(8) % 3


def built(module=None, model_class=trainer.Model, strategy=None, **compiled):
    with (strategy or mirrored(1)).scope():
        model = model_class(LinenMLP(batch_norm=True, dropout=0.5) if module is None else module, seed=1)
        model.compile("sgd", logits_loss(), **compiled)
    model.build(X)
    return model


def by_operation(model, x, training=False):
    return model.apply(model.state.params, model.state, x, training=training)[0]


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("module", [LinenMLP, NNXMLP])
def test_a_call_has_the_numbers_of_the_present_state_and_compiles_once(module, training):
    model = built(module(batch_norm=True, dropout=0.5))
    first = np.asarray(model(X, training=training))
    np.testing.assert_allclose(first, by_operation(model, X, training), rtol=1e-5, atol=1e-6)
    model.fit(X, Y, verbose=0)
    with count_compilations() as compiled:
        second = np.asarray(model(X, training=training))
    assert not compiled
    np.testing.assert_allclose(second, by_operation(model, X, training), rtol=1e-5, atol=1e-6)
    assert np.abs(second - first).max() > 1e-4


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_call_has_the_same_numbers_under_every_strategy(name):
    strategy = STRATEGIES[name]()
    np.testing.assert_allclose(
        built(strategy=strategy)(X[:5]), by_operation(built(), X[:5]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_call_may_be_differentiated_mapped_and_compiled_by_the_caller():
    model = built()

    def total(x):
        return jnp.square(model(x)).sum()

    def total_by_operation(x):
        return jnp.square(by_operation(model, x)).sum()

    np.testing.assert_allclose(jax.grad(total)(X), jax.grad(total_by_operation)(X), rtol=1e-5)
    by_row = jax.jit(jax.vmap(lambda row: model(row[None])[0]))
    np.testing.assert_allclose(by_row(X), model(X), rtol=1e-4, atol=1e-6)
    model.fit(X, Y, verbose=0)
    by_row(X)  # the weights that it holds still exist


def test_what_is_compiled_again_is_called_anew():
    model = built(nn.Dense(3))
    full = model(X)
    model.compile("sgd", logits_loss(), precision="mixed_bfloat16")
    assert 1e-4 < np.abs(np.asarray(model(X)) - full).max() < 0.1


class Scaled(trainer.Model):
    scale = 1.0

    def apply(self, *args, **kwargs):
        outputs, state = super().apply(*args, **kwargs)
        return self.scale * outputs, state


def test_an_overridden_apply_is_called_each_time():
    model = built(nn.Dense(3), Scaled)
    once = np.asarray(model(X))
    model.scale = 2.0
    np.testing.assert_allclose(model(X), 2 * once, rtol=1e-6)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls.append(type(x))
        return nn.Dense(3)(x)


calls: list[type] = []


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("eager", "more"), [(True, 2), (False, 1)])
def test_a_module_that_runs_eagerly_is_called_each_time(eager, more):
    model = built(Counting(), run_eagerly=eager)
    before = len(calls)
    model(X), model(X)
    assert len(calls) == before + more
    assert issubclass(calls[-1], jax.core.Tracer) is not eager


class WithName(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"outputs": nn.Dense(3)(x), "name": "dense", "rows": len(x)}


def test_outputs_that_are_no_arrays_are_returned_as_they_are():
    model = trainer.Model(WithName())
    for _ in range(2):
        outputs = model(X)
        assert (outputs["name"], outputs["rows"], outputs["outputs"].shape) == ("dense", 8, (8, 3))


def test_a_copy_of_a_model_calls_its_own_module():
    model = trainer.Model(nn.Dense(3))
    other = copy.copy(model)
    other.build(X), model.build(X)
    other.set_weights([np.ones_like(weight) for weight in other.get_weights()])
    assert not np.allclose(model(X), other(X))


@pytest.mark.slow
def test_a_model_that_is_not_built_cannot_be_called_in_a_step():
    teacher = trainer.Model(nn.Dense(1), name="teacher")

    class Student(trainer.Model):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return super().compute_loss(x, teacher(x), y_pred, sample_weight)

    model = Student(nn.Dense(1))
    model.compile("sgd", "mse")
    x = np.ones((4, 2), np.float32)
    with pytest.raises(RuntimeError, match=r"teacher is not built.*`build\(sample\)`"):
        model.fit(x, x[:, :1], verbose=0)
    teacher.build(x)
    model.fit(x, x[:, :1], verbose=0)
