"""Programs that XLA divides over devices: the value of one device, for operations of which it would compute others."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.core.compile.traces.undivided import with_undivided_axes

ROWS, IMAGES, SERIES = (24, 6), (24, 8, 8, 3), (24, 6, 4)


def over_rows(*args, **options):
    return lambda x: lax.conv_general_dilated(
        x[None], waves(3, 6, 5), *args, dimension_numbers=("NWC", "WIO", "NWC"), **options)[0]


def waves(*shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def convolved(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def of_each_row(kernel, **options):
    """Gradients by row, as training with differential privacy takes them."""
    return jax.vmap(lambda row: jax.grad(lambda kernel: jnp.sin(convolved(row[None], kernel, **options)).sum())(kernel))


def with_nan(function):
    return lambda x: function(x.at[5, 2].set(jnp.nan))


def pool(kind, window, strides, padding="VALID"):
    return lambda x: kind(x[None], (window,), (strides,), padding)[0]


FUNCTIONS = {
    "overlapping maxima": (pool(nn.max_pool, 3, 1, "SAME"), ROWS), "maxima": (pool(nn.max_pool, 2, 2), ROWS),
    "maxima with strides": (pool(nn.max_pool, 3, 2, "SAME"), ROWS), "means": (pool(nn.avg_pool, 3, 1), ROWS),
    "convolution": (over_rows((1,), "SAME"), ROWS), "with strides": (over_rows((2,), "SAME"), (8, 6)),
    "dilated": (over_rows((1,), "SAME", rhs_dilation=(2,)), ROWS),
    "transposed": (over_rows((1,), [(2, 2)], lhs_dilation=(2,)), ROWS),
    "gradients of each row": (of_each_row(waves(3, 3, 3, 4)), IMAGES),
    "gradients of each row and channel": (of_each_row(waves(3, 3, 1, 6), feature_group_count=3), IMAGES),
    "transform": (lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), SERIES),
    "transform of two axes": (lambda x: jnp.abs(jnp.fft.fft2(x, axes=(0, 1))), SERIES),
    "maximum": (with_nan(lambda x: x.max(0)), ROWS), "of all": (with_nan(jnp.min), ROWS),
    "of the last axis": (with_nan(lambda x: x.T.max(-1)), ROWS),
    "of absolute values": (with_nan(lambda x: jnp.isfinite(jnp.abs(x).max())), ROWS),
    "of segments": (with_nan(lambda x: jax.ops.segment_max(x, jnp.arange(24) % 5, 7)), ROWS),
    "of segments of whole numbers": (
        lambda x: jax.ops.segment_min((9 * x).astype(jnp.int32), jnp.arange(24) % 5, 7), ROWS),
    "a function of one's own": (
        lambda x: jax.lax.reduce(x, np.float32(1), lambda one, other: one * jnp.cos(other), (0,)), ROWS),
    "softmax": (with_nan(lambda x: nn.softmax(x, 0)), ROWS),
    "logarithm of exponentials": (with_nan(lambda x: nn.logsumexp(x, 0)), ROWS),
    "in a loop": (lambda x: lax.scan(lambda x, _: (pool(nn.max_pool, 3, 1, "SAME")(x), None), x, length=2)[0], ROWS),
    "in a branch": (lambda x: lax.cond(x.sum() > 0, pool(nn.max_pool, 3, 1, "SAME"), jnp.tanh, x), ROWS),
}


def divided(count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("replica",))
    return mesh, NamedSharding(mesh, PartitionSpec("replica"))


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled
def test_values_and_gradients_are_one_devices(name, count):
    function, shape = FUNCTIONS[name]

    def value_and_gradient(x):
        value, pullback = jax.vjp(function, x)
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        return value, pullback(waves(*value.shape)) if is_float else None

    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mesh, rows = divided(count)
    expected = jax.jit(value_and_gradient)(x)
    actual = jax.jit(with_undivided_axes(jax.jit(value_and_gradient), mesh))(jax.device_put(x, rows))
    for found, wanted in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


SCATTERS = {
    "sum of segments": lambda x: jax.ops.segment_sum(x, kinds(x), 3),
    "product of segments": lambda x: jax.ops.segment_prod(x, kinds(x), 3),
    "maximum of segments": lambda x: jax.ops.segment_max(x, kinds(x), 3),
    "additions to rows": lambda x: x.at[kinds(x)].add(1.0),
    "an element of each row": lambda x: x.at[jnp.arange(len(x)), kinds(x)].add(1.0),
    "gradient of chosen rows": jax.grad(lambda x: jnp.square(x[kinds(x)]).sum()),
    "counts": lambda x: jnp.bincount(kinds(x), x[:, 1], length=3),
    "rows of a kind": lambda x: x[jnp.nonzero(x[:, 0] > 0, size=3)[0]],
}


def kinds(x):
    return jnp.abs(37 * x[:, 0]).astype(jnp.int32) % 3


@pytest.mark.sampled(2)
@pytest.mark.every_case
@pytest.mark.parametrize("spec", [("a", "b"), ("a",), ("b", "a"), (("a", "b"),)], ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_of_uneven_rows_over_several_axes_are_one_devices(name, spec):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)

    def uneven(x):
        return SCATTERS[name](lax.with_sharding_constraint(x[:7], sharding))

    expected = SCATTERS[name](jnp.asarray(x[:7]))
    actual = jax.jit(with_undivided_axes(jax.jit(uneven), mesh))(jax.device_put(x, NamedSharding(
        mesh, PartitionSpec(("a", "b")))))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_what_replicas_compute_stays_as_it_is():
    mesh, rows = divided(2)
    on_replicas = jax.jit(jax.shard_map(
        pool(nn.max_pool, 3, 1, "SAME"), mesh=mesh, in_specs=rows.spec, out_specs=rows.spec))
    x = jnp.ones(ROWS)
    assert str(jax.make_jaxpr(with_undivided_axes(on_replicas, mesh))(x)) == str(jax.make_jaxpr(on_replicas)(x))


@pytest.mark.slow
def test_the_program_of_an_ordinary_network_stays_as_it_is():
    layers = nn.Sequential([nn.Conv(4, (3, 3), (2, 2)), lambda x: nn.max_pool(x, (3, 3), (2, 2)), nn.softmax])
    mesh, rows = divided(2)
    params = layers.init(jax.random.key(0), waves(*IMAGES))
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sin(layers.apply(params, x)).sum()))

    def collectives(function):
        text = jax.jit(function).lower(params, jax.device_put(waves(*IMAGES), rows)).compile().as_text()
        return [line.split("channel_id")[0] for line in text.splitlines() if " all-" in line or "collective-" in line]

    assert collectives(with_undivided_axes(gradient, mesh)) == collectives(gradient) != []
