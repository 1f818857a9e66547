"""Random keys as a function of (seed, stream, step, replica): nothing to store, nothing to restore."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as extended_random

_default_seed = 0


def set_default_seed(seed: int) -> None:
    """Sets the seed of the models that will be made without one."""
    global _default_seed
    _default_seed = seed


def default_seed() -> int:
    """Returns the seed of a model that is made without one.

    >>> default_seed()
    0
    """
    return _default_seed


def stream_key(
    seed: int | jax.Array, stream: str, step: int | jax.Array = 0, replica: int | jax.Array = 0
) -> jax.Array:
    """Returns the key of a random stream.

    Args:
      seed: the model's seed, an int or an integer scalar.
      stream: the stream's name, such as "dropout".
      step: the train step, so that each step draws other numbers.
      replica: the replica's number, so that each replica draws other numbers.

    Returns:
      A typed PRNG key of shape `()`.
    """
    key = jax.random.key(seed)
    for part in (zlib.crc32(stream.encode()) & 0x7FFFFFFF, step, replica):
        key = jax.random.fold_in(key, part)
    return key


def equal_draws_key(seed: int | jax.Array, stream: str, step: int | jax.Array = 0) -> jax.Array:
    """Returns a key of a random stream whose draws have one value in all places, whatever their shape.

    So have the keys that it is split into, as there may be one for each row. With it, code which draws for some rows
    can be compared with what it computes for others. Uniform numbers are between a quarter and a half: what keeps more
    than half of the units keeps all.

    Args:
      seed: as in `stream_key`; so are the others.
      stream: see `seed`.
      step: see `seed`.

    >>> key = equal_draws_key(0, "noise")
    >>> jax.random.uniform(key, (2, 3)).min() == jax.random.uniform(key, (5,)).max()
    Array(True, dtype=bool)
    """
    key = jax.random.key(seed, impl=_THREEFRY)
    for part in (zlib.crc32(stream.encode()) & 0x7FFFFFFF, step):
        key = jax.random.fold_in(key, part)
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_equal_draws())


_THREEFRY = "threefry2x32"


@functools.cache
def _equal_draws() -> Any:
    def key_of(data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data, impl=_THREEFRY)

    def random_bits(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        drawn = jax.random.bits(key_of(data), (), f"uint{bit_width}")
        return jnp.broadcast_to((drawn >> 2) | drawn.dtype.type(1 << (bit_width - 2)), shape)

    return extended_random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl=_THREEFRY)),
        split=lambda data, shape: jnp.broadcast_to(
            jax.random.key_data(jax.random.fold_in(key_of(data), 0)), (*shape, 2)),
        random_bits=random_bits,
        fold_in=lambda data, number: jax.random.key_data(jax.random.fold_in(key_of(data), number)),
        name="equal_draws",
        tag="equal",
    )
