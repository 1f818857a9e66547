"""Bits of some rows, which are those of all rows in their places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from trainer.core.compile.traces.row_bits import UnlikeDraws, _places, with_bits_of_rows

KEY, X = jax.random.key(3), jnp.ones((8, 5, 2))
FUNCTIONS = {
    "of the rows' shape": lambda key, x: jax.random.bits(key, x.shape),
    "of 8 bits": lambda key, x: jax.random.bits(key, x.shape, "uint8"),
    "one for each row": lambda key, x: jax.random.uniform(key, (len(x),)),
    "rows in one axis with others": lambda key, x: jax.random.bits(key, (len(x) * 5, 2)).reshape(x.shape),
    "a raw key": lambda key, x: jax.random.normal(jax.random.key_data(key), x.shape),
    "derived keys": lambda key, x: jax.random.gumbel(jax.random.split(jax.random.fold_in(key, 1))[1], x.shape),
    "in a loop": lambda key, x: lax.fori_loop(
        0, 3, lambda turn, x: x + jax.random.normal(jax.random.fold_in(key, turn), x.shape), x),
    "in a branch": lambda key, x: lax.cond(
        jax.random.bernoulli(key), lambda x: x + jax.random.normal(key, x.shape), lambda x: x, x),
    "recomputed": lambda key, x: jax.vjp(jax.checkpoint(
        lambda x: jnp.sin(x * jax.random.normal(key, x.shape))), x)[1](x)[0],
    "beside equal shapes without rows": lambda key, x: (
        jax.random.normal(key, x.shape) * jax.random.normal(key, (2, 5, 2)).sum(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_have_the_bits_of_the_whole(name):
    whole = jax.jit(FUNCTIONS[name])
    parts = jax.vmap(with_bits_of_rows(whole, "replica"), (None, 0), axis_name="replica")(KEY, X.reshape(4, 2, 5, 2))
    np.testing.assert_array_equal(parts.reshape(-1, *parts.shape[2:]), whole(KEY, X))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("shape", "number"), [((3, 5), 0), ((2, 7, 3), 2**31 - 1), ((1, 2**17 + 3), 2**32 - 1)])
def test_places_are_counted_with_64_bits(shape, number):
    high, low = _places(shape, jnp.uint32(number))
    size = int(np.prod(shape))
    expected = (np.uint64(number) * np.uint64(size) + np.arange(size, dtype=np.uint64)).reshape(shape)
    np.testing.assert_array_equal((np.asarray(high, np.uint64) << np.uint64(32)) + np.asarray(low, np.uint64), expected)


@pytest.mark.parametrize("function", [
    lambda key, x: x + jax.random.normal(key, x.shape) if len(x) > 4 else x,
    lambda key, x: x + jax.random.normal(key, (1, 1, len(x) // 4)).sum()], ids=["how often", "which shapes"])
def test_draws_that_depend_on_the_number_of_rows_are_refused(function):
    noise = jax.jit(lambda key, x: function(key, x) + jax.random.normal(key))
    with pytest.raises(UnlikeDraws, match="what is drawn at random depends on the number of rows"):
        jax.vmap(with_bits_of_rows(noise, "replica"), (None, 0), axis_name="replica")(KEY, X[None, :4])
