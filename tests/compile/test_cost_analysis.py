"""The operations of a program, and what depends on them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from trainer.core.compile import cost_analysis
from trainer.engine.model.core.model_core import core_of


class Repeated(nn.Module):
    """Multiplies by a matrix again and again."""

    turns: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.orthogonal(), (16, 16))
        return jax.lax.scan(lambda carry, _: (carry @ kernel, None), x, length=self.turns)[0]


def convolved(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def nested(x, y):
    def outer(carry, _):
        return jax.lax.scan(lambda inner, _: (inner @ y, None), carry, length=3)[0], None

    return jax.lax.scan(jax.checkpoint(outer), x, length=5)[0]


PROGRAMS = {
    "no loop": (lambda x, y: x @ y, [(4, 4), (4, 4)], 0),
    "convolutions": (lambda x, kernel: jax.lax.scan(lambda carry, _: (convolved(carry, kernel), None), x, length=3)[0],
                     [(2, 8, 8, 4), (3, 3, 4, 4)], 2 * (2 * 8 * 8 * 4) * 2 * 3 * 3 * 4),
    "a loop in a loop": (nested, [(4, 4), (4, 4)], (15 - 1) * 2 * 4**3),
    "each element": (lambda x: jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, length=8)[0], [(6,)], 7 * 6),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_turns_but_the_first_are_counted(name):
    function, shapes, expected = PROGRAMS[name]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert cost_analysis.cost_of(jax.jit(function).trace(*arguments).jaxpr).repeated_flops == expected


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "steps"), [(2, 128), (100_000, 1)])
def test_a_step_with_a_long_loop_is_a_large_one(turns, steps):
    model = trainer.Model(Repeated(turns))
    model.compile("sgd", "mse")
    x = np.ones((8, 16), np.float32)
    model.evaluate(x, x, batch_size=8, verbose=0)
    phase = core_of(model).configuration.phases["test"]
    assert phase.steps_per_execution >= steps if steps > 1 else phase.steps_per_execution == 1
    # Two products of 8 x 16 by 16 x 16, or 100,000.
    assert phase.step_flops == pytest.approx(turns * 2 * 8 * 16 * 16, rel=0.5 if turns < 9 else 0.01)


def test_what_no_output_depends_on_does_not_count():
    def both(x):
        return x @ x, jnp.sin(x)

    def one(x):
        return jax.jit(both)(x)[1]

    x = jnp.ones((4, 4))
    assert cost_analysis.cost_of(jax.jit(one).trace(x).jaxpr).flops == 16
    assert cost_analysis.cost_of(jax.jit(both).trace(x).jaxpr).flops == 16 + 2 * 4**3


def gradients_of(module, shape):
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.ones(shape))

    def gradients(params, x):
        return jax.grad(lambda params: jnp.square(module.apply(params, x)).mean())(params)

    return jax.jit(gradients).trace(params, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("module", "shape"), [
    (nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(16)]), (8, 64)),
    (nn.Sequential([nn.Conv(16, (3, 3)), nn.relu, nn.Conv(32, (3, 3), (2, 2)), nn.Conv(8, (1, 1), (2, 2))]),
     (8, 32, 32, 3)),
    (nn.Sequential([nn.Conv(16, (3, 3), feature_group_count=16), nn.LayerNorm(), nn.gelu]), (8, 32, 32, 16)),
    (nn.MultiHeadDotProductAttention(4), (2, 32, 16)),
], ids=["dense", "strided convolutions", "depthwise", "attention"])
def test_a_step_without_loops_has_about_as_many_as_xla_counts(module, shape):
    traced = gradients_of(module, shape)
    assert cost_analysis.cost_of(traced.jaxpr).flops == pytest.approx(
        traced.lower().cost_analysis()["flops"], rel=0.25)
