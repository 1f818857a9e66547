"""Random keys as a function of seed, stream and step, on replicas also of their number: nothing to store or restore."""

from __future__ import annotations

import zlib

import jax

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
      replica: the number of a replica of `strategy.run`, or of a microbatch, so that each draws other numbers.

    Returns:
      A typed PRNG key of shape `()`.
    """
    key = jax.random.key(seed)
    for part in (zlib.crc32(stream.encode()) & 0x7FFFFFFF, step, replica):
        key = jax.random.fold_in(key, part)
    return key
