"""Random keys as a function of seed, stream, step and replica, so that nothing needs to be stored or restored."""

from __future__ import annotations

import zlib

import jax

_default_seed = 0


def set_default_seed(seed: int) -> None:
    """Sets the seed of models created later without a seed."""
    global _default_seed
    _default_seed = seed


def default_seed() -> int:
    """Returns the seed of a model that is created without a seed.

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
      stream: name of the stream, such as "dropout".
      step: the train step; each step draws other numbers.
      replica: number of a replica of `strategy.run`, or of a microbatch; each draws other numbers.

    Returns:
      A typed PRNG key of shape `()`.
    """
    key = jax.random.key(seed)
    for part in (zlib.crc32(stream.encode()) & 0x7FFFFFFF, step, replica):
        key = jax.random.fold_in(key, part)
    return key
