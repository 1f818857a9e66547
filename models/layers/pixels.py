"""Preprocessing inside a model, for pixel values from 0 to 255."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rescaled(x: jax.Array, scale: float, offset: float = 0.0) -> jax.Array:
    """Returns `scale * x + offset` in the dtype of `x`, or in float32 for integers.

    >>> import jax.numpy as jnp
    >>> rescaled(jnp.array([0, 255], jnp.uint8), 1 / 127.5, -1.0)
    Array([-1.,  1.], dtype=float32)
    """
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
    # Bfloat16 represents pixels exactly, but would round the intermediate product.
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))
    return (wide * scale + offset).astype(dtype)
