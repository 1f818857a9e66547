"""The operations of loops, of which XLA counts one turn, and what depends on them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainer
from trainer.compile import cost_analysis


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
    assert cost_analysis.repeated_flops(jax.jit(function).trace(*arguments).jaxpr) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "steps"), [(2, 128), (100_000, 1)])
def test_a_step_with_a_long_loop_is_a_large_one(turns, steps):
    model = trainer.Model(Repeated(turns))
    model.compile("sgd", "mse")
    x = np.ones((8, 16), np.float32)
    model.evaluate(x, x, batch_size=8, verbose=0)
    phase = model._configuration.phases["test"]
    assert phase.steps_per_execution >= steps if steps > 1 else phase.steps_per_execution == 1
    # Two products of 8 x 16 by 16 x 16, or 100,000.
    assert phase.step_flops == pytest.approx(turns * 2 * 8 * 16 * 16, rel=0.5 if turns < 9 else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("module", [
    nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(16)]),
    nn.Sequential([nn.Conv(16, (3, 3)), nn.relu, lambda x: x.reshape(len(x), -1), nn.Dense(16)]),
], ids=["dense", "convolutions"])
def test_steps_are_fused_where_xla_counts_nothing_before_it_compiles_as_for_gpus(monkeypatch, module):
    def train_phase():
        model = trainer.Model(module)
        model.compile("adam", "mse", metrics=["mae"])
        shape = (32, 64) if isinstance(module.layers[0], nn.Dense) else (32, 8, 8, 3)
        model.fit(np.ones(shape, np.float32), np.ones((32, 16), np.float32), batch_size=8, verbose=0)
        return model._configuration.phases["train"]

    counted = train_phase()
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda lowered: None)
    phase = train_phase()
    assert phase.steps_per_execution == counted.steps_per_execution > 1
    assert phase.step_flops == pytest.approx(counted.step_flops, rel=0.5)
