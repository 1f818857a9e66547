"""Programs with their convolutions in the layout that is fast on CPUs: the same values, in loops and functions too."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.core.compile.traces.cpu_conv_layout import with_fast_convolutions

IMAGES, SEQUENCES, VOLUMES = (2, 9, 7, 4), (2, 16, 4), (2, 5, 6, 4, 2)
LAYERS = {
    "images": (nn.Conv(6, (3, 2)), IMAGES),
    "strides": (nn.Conv(6, (3, 3), (2, 1)), IMAGES),
    "one kernel for each channel": (nn.Conv(8, (3, 3), feature_group_count=4), IMAGES),
    "dilated": (nn.Conv(6, (3, 3), kernel_dilation=(2, 1), padding="VALID"), IMAGES),
    "transposed": (nn.ConvTranspose(6, (3, 3), (2, 2)), IMAGES),
    "transposed kernel": (nn.ConvTranspose(6, (3, 3), (2, 2), transpose_kernel=True), IMAGES),
    "sequences": (nn.Conv(6, (5,)), SEQUENCES),
    "volumes": (nn.Conv(6, (3, 2, 3)), VOLUMES),
    "two layers": (nn.Sequential([nn.Conv(4, (3, 3)), nn.relu, nn.Conv(6, (3, 3))]), IMAGES),
    "computed again": (nn.Sequential([nn.remat(nn.Conv)(4, (3, 3)), nn.relu, nn.remat(nn.Conv)(6, (3, 3))]), IMAGES),
}


def convolutions(program):
    """Yields the dimension numbers of the convolutions of a program, also those in loops and functions."""
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation.params["dimension_numbers"]
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                if hasattr(part, "eqns"):
                    yield from convolutions(part)


def is_fast(numbers):
    rank = len(numbers.lhs_spec)
    rows_first = (0, rank - 1, *range(1, rank - 1))
    return numbers.lhs_spec == numbers.out_spec == rows_first and (
        numbers.rhs_spec == (rank - 1, rank - 2, *range(rank - 2)))


def assert_same_with_fast_convolutions(function, *args):
    fast = jax.jit(with_fast_convolutions(jax.jit(function)))
    before, after = list(convolutions(jax.make_jaxpr(function)(*args))), list(convolutions(jax.make_jaxpr(fast)(*args)))
    assert len(before) == len(after) and not all(map(is_fast, before)) and all(map(is_fast, after))
    for actual, expected in zip(*map(jax.tree.leaves, (fast(*args), jax.jit(function)(*args))), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_same(name):
    layer, shape = LAYERS[name]
    x = jax.random.normal(jax.random.key(0), shape)
    params = layer.init(jax.random.key(1), x)
    assert_same_with_fast_convolutions(
        jax.value_and_grad(lambda params, x: jnp.sin(layer.apply(params, x)).sum(), (0, 1)), params, x)


def channels_first(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


@jax.custom_vjp
def with_a_gradient_of_its_own(x, kernel):
    return channels_first(x, kernel)


with_a_gradient_of_its_own.defvjp(
    lambda x, kernel: (with_a_gradient_of_its_own(x, kernel), (x, kernel)),
    lambda residuals, g: jax.vjp(channels_first, *residuals)[1](g))

FUNCTIONS = {
    "channels first": channels_first,
    "another gradient": with_a_gradient_of_its_own,
    "its gradient": jax.grad(lambda x, kernel: jnp.sin(with_a_gradient_of_its_own(x, kernel)).sum()),
    "in a loop": lambda x, kernel: jax.lax.scan(lambda x, _: (channels_first(x, kernel), None), x, length=3)[0],
    "in a loop of unknown length": lambda x, kernel: jax.lax.while_loop(
        lambda x: x.max() < 9, lambda x: jnp.abs(channels_first(x, kernel)) + 1, x),
    "in a branch": lambda x, kernel: jax.lax.cond(x.sum() > 0, channels_first, lambda x, kernel: x, x, kernel),
    "over a batch": jax.vmap(channels_first, (None, 0)),
    "in a solver": lambda x, kernel: jax.scipy.sparse.linalg.cg(
        lambda x: 99 * x + channels_first(x, kernel + kernel.swapaxes(0, 1)[..., ::-1, ::-1]), x, maxiter=3)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_layouts_are_rewritten_wherever_they_are(name):
    x = jax.random.normal(jax.random.key(0), (2, 4, 6, 5))
    kernel = jax.random.normal(jax.random.key(1), (2, 4, 4, 3, 3) if name == "over a batch" else (4, 4, 3, 3))
    assert_same_with_fast_convolutions(FUNCTIONS[name], x, kernel)


def test_the_dtype_of_a_product_stays():
    x, kernel = jnp.ones((2, 4, 6, 5), jnp.bfloat16), jnp.ones((4, 4, 3, 3), jnp.bfloat16)

    def function(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", preferred_element_type=jnp.float32)

    assert_same_with_fast_convolutions(function, x, kernel)
    assert with_fast_convolutions(jax.jit(function))(x, kernel).dtype == jnp.float32


def test_a_function_that_is_called_twice_is_rewritten_once():
    block = jax.jit(channels_first)
    x, kernel = jnp.ones((2, 4, 6, 5)), jnp.ones((4, 4, 3, 3))
    twice = jax.jit(lambda x, kernel: block(block(x, kernel), kernel))
    outer, = jax.make_jaxpr(with_fast_convolutions(twice))(x, kernel).eqns
    first, second = outer.params["jaxpr"].eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_a_program_without_slow_convolutions_is_called_as_it_is():
    layer, x = nn.Conv(4, (3, 3)), jnp.ones((2, 8, 8, 1))
    params = layer.init(jax.random.key(0), x)
    assert "transpose" not in str(jax.make_jaxpr(with_fast_convolutions(jax.jit(layer.apply)))(params, x))
