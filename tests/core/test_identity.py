"""Configurations are equal only if they compute the same, and then share compiled functions."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from trainer import optimizers
from trainer.core.identity import configuration_key
from trainer.optimizers.named import NamedRules
from trainer.optimizers.update_rule import UpdateRule


def scaled(factor, *, shift=0.0):
    return lambda x, power=2: factor * x**power + shift


@pytest.mark.parametrize("make", [
    lambda: 0.5, lambda: (1, "a", None), lambda: scaled(0.5), lambda: functools.partial(scaled(0.5), power=3),
    lambda: optax.adamw(1e-3), lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)),
    lambda: optimizers.Adam(1e-3, clipnorm=1.0), lambda: optimizers.get("sgd"),
    lambda: optimizers.get(optax.adamw(1e-3)),
    lambda: UpdateRule(optimizers.Adam(), is_frozen=functools.partial(str.startswith), ema_decay=0.9),
    lambda: NamedRules({"a": UpdateRule(optimizers.Adam()), "b": UpdateRule(optimizers.SGD(0.1))}),
])
def test_what_is_made_twice_in_the_same_way_is_equal(make):
    one, other = make(), make()
    if isinstance(one, (optimizers.Optimizer, UpdateRule, NamedRules)):
        assert one == other and hash(one) == hash(other)
    assert configuration_key(make) == configuration_key(make)
    if not isinstance(one, (optimizers.Optimizer, UpdateRule, NamedRules)):
        assert configuration_key(one) == configuration_key(other)


@pytest.mark.parametrize(("one", "other"), [
    (1, 1.0), (True, 1), (0.0, -0.0), ("1", 1), ((1,), [1]), (scaled(0.5), scaled(2.0)),
    (scaled(0.5), scaled(0.5, shift=1.0)), (jnp.ones(2), jnp.ones(2)),
    (functools.partial(scaled(0.5), power=3), functools.partial(scaled(0.5), power=4)),
    (optax.adamw(1e-3), optax.adamw(2e-3)), (optax.adamw(1e-3), optax.adam(1e-3)),
])
def test_what_may_compute_something_else_has_another_key(one, other):
    assert configuration_key(one) != configuration_key(other)


@pytest.mark.parametrize("other", [
    optimizers.Adam(2e-3), optimizers.Adam(1e-3, beta_1=0.8), optimizers.AdamW(1e-3),
    optimizers.Adam(1e-3, clipnorm=1.0), optimizers.get(optax.adam(1e-3)), optimizers.Adam(lambda count: 1e-3),
    optimizers.Adam(1e-3, name="other"),
])
def test_optimizers_that_differ_are_not_equal(other):
    assert optimizers.Adam(1e-3) != other and UpdateRule(optimizers.Adam(1e-3)) != UpdateRule(other)
    assert NamedRules({"a": UpdateRule(optimizers.Adam(1e-3))}) != NamedRules({"a": UpdateRule(other)})


def test_an_optimizer_whose_rate_was_set_differs_and_keeps_its_hash():
    one, other = optimizers.SGD(0.1), optimizers.SGD(0.1)
    before = hash(one)
    one.learning_rate = 0.2
    assert one != other and hash(one) == before


def test_a_function_that_captures_itself_has_a_key():
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    assert configuration_key(factorial) == configuration_key(factorial)


def test_equal_optimizers_share_a_compiled_function():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def update(rule, grads, state, params):
        traces.append(rule)
        return rule.update(grads, state, params)

    params = {"w": jnp.ones(2)}
    for rate in (0.1, 0.1, 0.2):
        rule = UpdateRule(optimizers.SGD(rate))
        new, _ = update(rule, params, rule.init(params), params)
        assert new["w"].tolist() == pytest.approx([1 - rate] * 2)
    assert len(traces) == 2
