"""Dot-product attention by the best kernel of the devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from trainer.core.ambient import state

AttentionImplementation = Literal["auto", "xla"]


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None, is_causal: bool = False,
    implementation: AttentionImplementation = "auto",
) -> jax.Array:
    """Returns the attention of queries over keys and values, as `jax.nn.dot_product_attention` computes it.

    cuDNN's kernel never stores the scores, an array of `length**2` numbers per head and row, and skips scores that a
    causal mask excludes. Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness",
    https://arxiv.org/abs/2205.14135.

    Args:
      query: array of shape `(rows, length, heads, features)`.
      key: array of shape `(rows, positions, heads, features)`; with fewer heads, each serves a group of query heads.
      value: array of the shape of `key`.
      mask: bool of a shape that broadcasts to `(rows, heads, length, positions)`, False at positions to ignore.
      is_causal: whether each position attends only to itself and earlier positions.
      implementation: "xla" or "auto". "auto" uses cuDNN's kernel on NVIDIA GPUs for 16-bit arrays of supported shapes,
        unless a strategy splits layers (`ModelParallelStrategy`), and XLA's otherwise.

    Example:

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (2, 5, 4, 8)
    """
    def by(kernel: str, mask: jax.Array | None) -> Callable[..., jax.Array]:
        return functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=is_causal, implementation=kernel)

    if implementation == "auto" and _is_for_cuda():
        whole = None if mask is None else _of_all_positions(mask, query.shape[1], key.shape[1])
        if _is_accepted(by("cudnn", whole), query, key, value):
            return by("cudnn", whole)(query, key, value)
    return by("xla", mask)(query, key, value)


def _is_for_cuda() -> bool:
    """Returns whether the program is for NVIDIA's GPUs, which may be only described, and splits only rows.

    JAX cannot partition cuDNN's kernel where the compiler chooses to split heads or features: measured with jax 0.10.2.
    """
    strategy: Any = state.current().strategy
    if strategy is None:
        return jax.default_backend() == "gpu"
    splits_rows_alone = strategy.replica_count == strategy.mesh.size
    return splits_rows_alone and strategy.mesh.devices.flat[0].platform in ("gpu", "cuda")


def _is_accepted(attention: Callable[..., jax.Array], *arrays: jax.Array) -> bool:
    """Returns whether JAX's own checks accept arrays."""
    try:  # with gradients, of which JAX checks more
        jax.eval_shape(lambda *arrays: jax.vjp(attention, *arrays)[0], *arrays)
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


def _of_all_positions(mask: jax.Array, length: int, positions: int) -> jax.Array:
    """Returns a mask of shape `(rows, heads, length, positions)`, in which rows and heads may be 1, as cuDNN needs."""
    return jax.numpy.broadcast_to(mask, (*mask.shape[:2], length, positions))
