"""Outputs that a trace proves to lie in [0, 1], and others."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from trainer.engine.step.probabilities import are_ones, are_probabilities

X = jnp.ones((4, 4))


def wrong_axis(x):
    powers = jnp.exp(x)
    return powers / powers.sum(0)[:, None]


def other_sums(x):
    return jnp.exp(x) / jnp.exp(2 * x).sum(1, keepdims=True)


@pytest.mark.parametrize(("function", "expected"), [
    (nn.softmax, True),
    (nn.sigmoid, True),
    (nnx.softmax, True),
    (lambda x: nn.softmax(x, axis=0), True),
    (lambda x: nn.softmax(x, axis=(0, 1)), True),
    (lambda x: nn.softmax(x.astype(jnp.bfloat16)).astype(jnp.float32), True),
    (lambda x: jax.jit(nn.softmax)(x)[:, 1], True),
    (lambda x: jax.checkpoint(nn.sigmoid)(x).reshape(-1), True),
    (lambda x: jnp.concatenate([nn.sigmoid(x), nn.softmax(x)]), True),
    (lambda x: nn.sigmoid(x) * nn.softmax(x).max(1, keepdims=True), True),
    (lambda x: x, False),
    (nn.log_softmax, False),
    (nn.relu, False),
    (lambda x: 2 * nn.sigmoid(x), False),
    (lambda x: nn.sigmoid(x) - nn.softmax(x), False),
    (lambda x: nn.sigmoid(x) @ nn.sigmoid(x), False),
    (lambda x: jnp.concatenate([nn.sigmoid(x), x]), False),
    (wrong_axis, False),
    (other_sums, False),
])
def test_only_outputs_of_softmax_and_sigmoid_are_proven(function, expected):
    assert are_probabilities(jax.make_jaxpr(function)(X)) == [expected]


@pytest.mark.parametrize(("function", "expected"), [
    (lambda x: nn.softmax(x[:, :1]), True),
    (lambda x: nn.softmax(x[:, :1]).reshape(-1), True),
    (lambda x: nn.softmax(x[:, :1], axis=0), False),
    (lambda x: nn.softmax(x), False),
    (lambda x: nn.sigmoid(x[:, :1]), False),
])
def test_a_softmax_over_a_single_number_is_proven_to_be_one(function, expected):
    assert are_ones(jax.make_jaxpr(function)(X)) == [expected]


def test_each_of_several_outputs_is_told_apart():
    assert are_probabilities(jax.make_jaxpr(lambda x: {"a": x, "b": nn.sigmoid(x)})(X)) == [False, True]
