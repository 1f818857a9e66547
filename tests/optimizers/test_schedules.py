"""Learning-rate schedules: Keras's arguments and numbers, traced or not, alone or inside optax."""

import inspect
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.optimizers import schedules

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "optimizers.json").read_text())
CASES = [pytest.param(case, id=f"{case['class']}-{i}") for i, case in enumerate(REFERENCE["schedules"])]


def built(case):
    return getattr(schedules, case["class"])(**case["arguments"])


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_has_kerass_numbers(case):
    values = [built(case)(step) for step in REFERENCE["schedule_steps"]]
    np.testing.assert_allclose(values, case["values"], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_a_traced_schedule_has_the_same_numbers_in_float32(case):
    steps = jnp.asarray(REFERENCE["schedule_steps"], jnp.int32)
    values = jax.jit(jax.vmap(built(case)))(steps)
    assert values.dtype == jnp.float32
    assert built(case)(steps[1]).shape == ()
    np.testing.assert_allclose(values, case["values"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", sorted(REFERENCE["schedule_arguments"]))
def test_a_schedule_takes_kerass_arguments_in_order_with_their_defaults(name):
    parameters = inspect.signature(getattr(schedules, name)).parameters.values()
    ours = [[parameter.name, None if parameter.default is parameter.empty else parameter.default]
            for parameter in parameters]
    assert ours == REFERENCE["schedule_arguments"][name]


def test_optax_takes_a_schedule():
    transformation = optax.sgd(schedules.PiecewiseConstantDecay([0], [0.5, 0.25]))
    gradient = jnp.ones(())
    state = transformation.init(gradient)
    first, state = transformation.update(gradient, state)
    second, _ = transformation.update(gradient, state)
    assert (float(first), float(second)) == (-0.5, -0.25)


def test_a_schedule_without_boundaries_is_constant():
    assert float(schedules.PiecewiseConstantDecay([], [0.5])(7)) == 0.5


def test_a_schedule_without_a_call_cannot_be_built():
    class Incomplete(schedules.LearningRateSchedule):
        pass

    with pytest.raises(TypeError, match="__call__"):
        Incomplete()


@pytest.mark.parametrize(("build", "message"), [
    (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), "`decay_steps` must be a number above 0. Received: decay_steps"),
    (lambda: schedules.InverseTimeDecay(0.1, -1, 0.5), "`decay_steps` must be a number above 0"),
    (lambda: schedules.PolynomialDecay(0.1, 0), "`decay_steps` must be a number above 0"),
    (lambda: schedules.CosineDecay(0.1, 0), "`decay_steps` must be a number above 0"),
    (lambda: schedules.CosineDecay(0.1, 5, warmup_steps=-1), "`warmup_steps` must be a number of at least 0"),
    (lambda: schedules.CosineDecayRestarts(0.1, 0), "`first_decay_steps` must be a number above 0"),
    (lambda: schedules.CosineDecayRestarts(0.1, 5, t_mul=0.5), "`t_mul` must be a number of at least 1"),
    (lambda: schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2]), "Received: 2 boundaries and 2 values"),
    (lambda: schedules.InverseTimeDecay(-0.1, 1, 0.5), "`initial_learning_rate` must be a number of at least 0"),
    (lambda: schedules.ExponentialDecay(0.1, 1, math.nan), "`decay_rate` must be a number of at least 0"),
    (lambda: schedules.PolynomialDecay(0.1, 1, -1.0), "`end_learning_rate` must be a number of at least 0"),
    (lambda: schedules.CosineDecay(1e300, 10), "`initial_learning_rate`"),
    (lambda: schedules.CosineDecay(0.1, 10, warmup_target=math.inf), "`warmup_target`"),
    (lambda: schedules.CosineDecayRestarts(0.1, 10, m_mul=-1.0), "`m_mul`"),
    (lambda: schedules.PiecewiseConstantDecay([1, 2], [0.1, math.nan, 0.2]), "`values`"),
    (lambda: schedules.PiecewiseConstantDecay([2, 1], [0.1, 0.2, 0.3]), "`boundaries` must ascend"),
])
def test_an_impossible_schedule_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
