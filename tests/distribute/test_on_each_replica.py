"""Code that runs once per replica inside of a step that XLA divides: what it sees, returns, and its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu  # noqa: F401  Pallas imports it in its first call: it sets variables

import trainer
from tests.support.networks import mirrored
from trainer import distribute
from trainer.core import replica_context
from trainer.distribute import get_replica_context, on_each_replica
from trainer.distribute.replica.partitioned import PartitionedContext

ROWS = 8
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 6)).astype(np.float32)
params = {"kernel": rng.normal(size=(6, 3)).astype(np.float32), "bias": rng.normal(size=(3,)).astype(np.float32)}


def in_step(strategy, function, *args, rows=ROWS):
    """Returns `function(*args)` in a program that XLA divides over a strategy's devices, as a step of `fit`."""
    split = jax.sharding.NamedSharding(strategy.mesh, strategy.rows_spec)
    whole = jax.sharding.NamedSharding(strategy.mesh, jax.sharding.PartitionSpec())
    is_even = rows % strategy.num_replicas_in_sync == 0

    def step(*args):
        with replica_context.enter(PartitionedContext(strategy, rows)):
            return function(*args)

    placed = jax.tree.map(
        lambda leaf: jax.device_put(leaf, split if is_even and jnp.shape(leaf)[:1] == (rows,) else whole), args)
    return jax.jit(step)(*placed)


def strategies():
    devices = [f"cpu:{index}" for index in range(4)]
    return {
        "one": mirrored(1), "two": mirrored(2), "four": mirrored(4),
        "fully sharded": distribute.FullyShardedStrategy(devices, min_shard_bytes=0),
        "model parallel": distribute.ModelParallelStrategy({"replica": 2, "model": 2}, devices),
        "hybrid": distribute.FullyShardedStrategy(devices, mesh_shape={"replica": 2, "shard": 2}, min_shard_bytes=0),
    }


def per_row(x, *, params):
    return jnp.tanh(x @ params["kernel"] + params["bias"])


def on_host(x, scale):
    return np.asarray(x) * np.asarray(scale)


def callback(x, *, params):
    scaled = jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, params["kernel"][:, 0])
    return scaled[:, :3] + params["bias"]


def double_rows(ref, out):
    out[...] = 2.0 * ref[...]


def pallas(x, *, params):
    doubled = pl.pallas_call(double_rows, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
    return doubled @ params["kernel"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("function", [per_row, callback, pallas])
@pytest.mark.parametrize("name", strategies())
def test_each_row_is_what_one_call_gives(name, function):
    found = in_step(strategies()[name], lambda params, x: on_each_replica(function)(x, params=params), params, x)
    np.testing.assert_allclose(found, function(jnp.asarray(x), params=params), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", strategies())
@pytest.mark.parametrize("way", ["keyword", "captured"])
def test_gradients_are_those_of_a_plain_call(name, way):
    calls = {"keyword": lambda params, x: on_each_replica(per_row)(x, params=params),
             "captured": lambda params, x: on_each_replica(lambda x: per_row(x, params=params))(x)}

    def loss(outputs, params, x):
        return jnp.square(outputs(params, x) - 0.3).sum() + (outputs(params, 2 * x) * x[:, :1]).mean()

    ours = in_step(strategies()[name], jax.grad(lambda *args: loss(calls[way], *args), argnums=(0, 1)), params, x)
    plain = jax.grad(lambda *args: loss(lambda params, x: per_row(x, params=params), *args), argnums=(0, 1))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain(params, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", strategies())
def test_gradients_in_bfloat16_are_summed_over_the_replicas(name):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
    loss = lambda params, x: jnp.square(on_each_replica(per_row)(x, params=params)).sum()
    ours = in_step(strategies()[name], jax.grad(loss), *half)
    assert ours["kernel"].dtype == jnp.bfloat16
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.grad(loss)(*half)), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=5e-2, atol=5e-2)


def seen_in(strategy, *args, rows=ROWS, **kwargs):
    """Returns the shapes that `on_each_replica` gives to a function, its context, and those of a nested call."""
    seen = {}

    def function(*args, **kwargs):
        seen["shapes"] = jax.tree.map(jnp.shape, (args, kwargs))
        context = get_replica_context()
        seen["context"] = context.rows, context.num_replicas_in_sync, context.replica_id_in_sync_group
        seen["nested"] = on_each_replica(lambda x: x)(args[0]).shape
        return args[0]

    in_step(strategy, lambda args, kwargs: on_each_replica(function)(*args, **kwargs), args, kwargs, rows=rows)
    return seen


def test_positional_arrays_are_split_and_others_are_whole():
    seen = seen_in(mirrored(4), x, {"tokens": x[:, None], "count": np.float32(3)}, weights=x)
    assert seen["shapes"] == (((2, 6), {"tokens": (2, 1, 6), "count": ()}), {"weights": (8, 6)})
    assert seen["context"] == (2, 1, 0)
    assert seen["nested"] == (2, 6)


def test_arguments_that_are_no_arrays_reach_the_function_as_they_are():
    def function(x, power, *, name, nothing):
        assert (power, name, nothing) == (2, "square", None)
        return x**power

    found = in_step(mirrored(4), lambda x: on_each_replica(function)(x, 2, name="square", nothing=None), x)
    np.testing.assert_allclose(found, x**2, rtol=1e-6)


@pytest.mark.slow
def test_keys_of_the_rows_are_split_with_them():
    def noise(x, keys):
        return x + jax.vmap(jax.random.normal)(keys)[:, None]

    keys = jax.random.split(jax.random.key(0), ROWS)
    np.testing.assert_allclose(in_step(mirrored(4), on_each_replica(noise), x, keys), noise(x, keys), rtol=1e-5)


@pytest.mark.parametrize(("strategy", "rows"), [(mirrored(1), ROWS), (mirrored(4), 7), (mirrored(4), 2)],
                         ids=["one replica", "an uneven batch", "fewer rows than replicas"])
def test_the_whole_batch_is_given_where_it_cannot_be_split(strategy, rows):
    assert seen_in(strategy, x[:rows], rows=rows)["shapes"] == (((rows, 6),), {})


def test_a_replica_of_a_custom_loop_calls_it_with_its_own_rows():
    strategy = mirrored(4)
    dataset = trainer.data.Dataset.from_arrays(x).batch(ROWS)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    found = strategy.run(lambda x: on_each_replica(lambda x: jnp.full(len(x), len(x)))(x), args=(batch,))
    assert strategy.gather(found).tolist() == [2] * ROWS


def test_outside_of_a_step_it_is_a_plain_call():
    assert on_each_replica(lambda x: x.sum())(np.ones((3, 2))) == 6.0
    named = on_each_replica(per_row)
    assert named.__name__ == "per_row"


@pytest.mark.parametrize(("function", "text"), [
    (lambda x: x[0, 0], r"for each of the replica's {rows} rows.*Received: array of shape \(\) and dtype float32.*one "
                        "value per row"),
    (lambda x: {"out": x, "aux": x[0]}, r"Received at \['aux'\]: array of shape \(6,\)"),
    (lambda x: (x, 1.0), r"Received at \[1\]: float"),
    (lambda x: jnp.concatenate([x, x]), r"must return .*{rows} rows"),
], ids=["a scalar", "one row", "a number", "too many rows"])
@pytest.mark.parametrize(("replicas", "rows"), [(1, 8), (4, 2)])
def test_outputs_that_are_not_of_the_rows_are_refused_on_any_number_of_devices(replicas, rows, function, text):
    with pytest.raises(ValueError, match=text.replace("{rows}", str(rows))):
        in_step(mirrored(replicas), on_each_replica(function), x)


def mean_of_rows(x):
    return jax.jit(lambda x: x - jnp.mean(x, 0))(x)


def one_key(x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


@pytest.mark.parametrize(("function", "text"), [
    (mean_of_rows, r"`mean_of_rows` .*each row from that row alone: rows are combined \(`reduce_sum`\)"),
    (lambda x: jnp.cumsum(x, 0), r"rows are combined \(`cumsum`\)"),
    (lambda x: jnp.sort(x, 0), r"rows are combined \(`sort`\)"),
    (one_key, r"random numbers of all rows are drawn by one key"),
], ids=["mean", "cumsum", "sort", "draw"])
@pytest.mark.parametrize("replicas", [1, 4])
def test_rows_that_are_not_computed_alone_are_refused_on_any_number_of_devices(replicas, function, text):
    with pytest.raises(ValueError, match=text):
        in_step(mirrored(replicas), on_each_replica(function), x)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("function", [
    lambda x: x - x.mean(1, keepdims=True), lambda x: jnp.sort(x), lambda x: jnp.cumsum(x, 1),
    lambda x: x + jax.random.normal(jax.random.key(0), (6,))])
def test_what_is_computed_along_other_axes_is_of_each_row(function):
    np.testing.assert_allclose(in_step(mirrored(4), on_each_replica(function), x), function(x), rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_positional_array_without_the_rows_is_refused(replicas):
    with pytest.raises(ValueError, match=r"arrays of shape \(8, ...\). Received: array of shape \(5,\).*by keyword"):
        in_step(mirrored(replicas), on_each_replica(lambda x, prototypes: x), x, np.zeros(5, np.float32))


def test_an_error_says_that_rows_by_keyword_are_whole():
    with pytest.raises(TypeError) as caught:
        in_step(mirrored(4), lambda x: on_each_replica(lambda x, *, other: x * other)(x, other=x), x)
    assert any("pass rows by position" in note for note in caught.value.__notes__)


def test_a_divided_program_computes_each_row_once():
    """Each device calls the host with its rows alone: without `on_each_replica`, XLA would gather all of them."""
    given = []

    def note(x):
        given.append(len(x))
        return x

    def call(x):
        return jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    jax.block_until_ready(in_step(mirrored(4), on_each_replica(call), x))
    assert given == [2] * 4
