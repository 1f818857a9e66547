"""The Transformer block: self-attention and an MLP, each with a residual connection and a LayerNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from trainer.models.layers.dot_product_attention import AttentionImplementation, dot_product_attention

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of one block, of shape `(rows, length, heads, features per head)`."""

KERNEL_STDDEV = 0.02  # as in GPT-2 and BERT


class SelfAttention(nn.Module):
    """Multi-head self-attention with an optional mask and cache.

    Vaswani et al., "Attention is all you need", https://arxiv.org/abs/1706.03762. Attention weights have no dropout,
    because `jax.nn.dot_product_attention` has none.

    Attributes:
      num_heads: number of heads. The features are divided among the heads.
      is_causal: whether each position attends only to itself and earlier positions.
      out_stddev: standard deviation of the output layer's initial kernel.
      implementation: kernel of the attention, as in `dot_product_attention`. With a cache, it is XLA's.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.
    """

    num_heads: int
    is_causal: bool = False
    out_stddev: float = KERNEL_STDDEV
    implementation: AttentionImplementation = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, cache: Cache | None = None, start: int | jax.Array = 0
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the outputs, of the shape of `x`, and the cache with the keys and values of `x`.

        Args:
          x: array of shape `(rows, length, features)`.
          mask: bool of shape `(rows, positions)`, False at positions to ignore.
          cache: keys and values of earlier positions, if `x` follows them; only for causal attention.
          start: cache position of the first element of `x`.
        """
        features = x.shape[-1]

        def heads(name: str) -> jax.Array:
            return self._dense(features, name)(x).reshape(*x.shape[:-1], self.num_heads, features // self.num_heads)

        query, key, value = heads("query"), heads("key"), heads("value")
        allowed = None if mask is None else mask[:, None, None, :]
        if cache is not None:
            cache, allowed = extended(cache, key, value, start)
            key, value = cache
        outputs = dot_product_attention(
            query, key.astype(query.dtype), value.astype(query.dtype), allowed, self.is_causal and cache is None,
            self.implementation if cache is None else "xla")
        return self._dense(features, "out", self.out_stddev)(outputs.reshape(x.shape)), cache

    def _dense(self, features: int, name: str, stddev: float = KERNEL_STDDEV) -> nn.Dense:
        return nn.Dense(features, kernel_init=nn.initializers.normal(stddev), dtype=self.dtype,
                        param_dtype=self.param_dtype, name=name)


class TransformerBlock(nn.Module):
    """Self-attention and an MLP with one hidden layer, each with a residual connection.

    Attributes:
      num_heads: number of attention heads.
      mlp_dim: width of the hidden layer.
      norm_first: whether LayerNorm is applied to the inputs of both parts, as in GPT-2, or to the sums, as in BERT.
      norm_epsilon: value that LayerNorm adds to the variance.
      activation: activation of the hidden layer.
      is_causal: whether each position attends only to itself and earlier positions.
      out_stddev: standard deviation of the initial kernels of both output layers.
      dropout_rate: dropout rate of the outputs of both parts.
      implementation: kernel of the attention, as in `dot_product_attention`.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.
    """

    num_heads: int
    mlp_dim: int
    norm_first: bool
    norm_epsilon: float
    activation: Callable[[jax.Array], jax.Array]
    is_causal: bool = False
    out_stddev: float = KERNEL_STDDEV
    dropout_rate: float = 0.0
    implementation: AttentionImplementation = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, cache: Cache | None = None, start: int | jax.Array = 0,
        training: bool = False,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the outputs, of the shape of `x`, and the cache, as in `SelfAttention`."""
        def attend(x: jax.Array) -> jax.Array:
            nonlocal cache
            outputs, cache = SelfAttention(
                self.num_heads, self.is_causal, self.out_stddev, self.implementation, **options,
                name="attention")(x, mask, cache, start)
            return outputs

        def perceive(x: jax.Array) -> jax.Array:
            hidden = self.activation(nn.Dense(
                self.mlp_dim, kernel_init=nn.initializers.normal(KERNEL_STDDEV), **options, name="mlp_in")(x))
            return nn.Dense(x.shape[-1], kernel_init=nn.initializers.normal(self.out_stddev), **options,
                            name="mlp_out")(hidden)

        options = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for part, name in ((attend, "attention_norm"), (perceive, "mlp_norm")):
            norm = layer_norm(self.norm_epsilon, self.dtype, self.param_dtype, name)
            inner = part(norm(x) if self.norm_first else x)
            x = x + nn.Dropout(self.dropout_rate, deterministic=not training)(inner)
            if not self.norm_first:
                x = norm(x)
        return x, cache


def layer_norm(epsilon: float, dtype: DTypeLike, param_dtype: DTypeLike, name: str | None = None) -> nn.LayerNorm:
    """Returns a LayerNorm with an exact variance; the fast variance, E[x^2] - E[x]^2, fails where the mean is large."""
    return nn.LayerNorm(epsilon=epsilon, use_fast_variance=False, dtype=dtype, param_dtype=param_dtype, name=name)


def embedding(count: int, features: int, dtype: DTypeLike, param_dtype: DTypeLike, name: str | None = None,
              stddev: float = KERNEL_STDDEV) -> nn.Embed:
    """Returns an embedding table of `count` vectors."""
    return nn.Embed(count, features, embedding_init=nn.initializers.normal(stddev), dtype=dtype,
                    param_dtype=param_dtype, name=name)


def check_sizes(name: str, d_model: int, num_heads: int) -> None:
    """Raises ValueError if `d_model` is not a multiple of `num_heads`."""
    if num_heads < 1 or d_model % num_heads:
        raise ValueError(f"{name} divides its features among its heads: `d_model` must be a multiple of `num_heads`. "
                         f"Received: d_model={d_model}, num_heads={num_heads}.")


def check_tokens(name: str, tokens: jax.Array, max_len: int) -> None:
    """Checks that `tokens` are integers of shape `(rows, length)`, with at most `max_len` tokens per row.

    Raises:
      TypeError: if the dtype is not an integer type.
      ValueError: if the shape is wrong or the rows are too long.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{name} expects tokens of a dtype of whole numbers. Received: {tokens.dtype}. Convert them: "
                        "`tokens.astype(np.int32)`.")
    if tokens.ndim != 2:
        raise ValueError(f"{name} expects tokens of shape (rows, length). Received: shape {tokens.shape}. A single "
                         "text needs an axis of rows: `tokens[None]`.")
    if not 1 <= tokens.shape[1] <= max_len:
        raise ValueError(f"{name} expects rows of 1 to {max_len} tokens. Received: shape {tokens.shape}. Cut them into "
                         "parts, or make the model with a larger `max_len`.")


def extended(cache: Cache, key: jax.Array, value: jax.Array, start: int | jax.Array) -> tuple[Cache, jax.Array]:
    """Returns the cache with further keys and values, and the mask of their causal attention to it.

    Args:
      cache: keys and values of earlier positions.
      key: keys, of shape `(rows, length, heads, features per head)`.
      value: values, of the same shape.
      start: cache position of the first key.

    Returns:
      The cache, and a bool array of shape `(1, 1, length, length of the cache)`.
    """
    written = (_written(cache[0], key, start), _written(cache[1], value, start))
    # The cache is zero after these keys, and no position may attend to it.
    seen = jnp.arange(written[0].shape[1]) <= start + jnp.arange(key.shape[1])[:, None]
    return written, seen[None, None]


def _written(kept: jax.Array, new: jax.Array, start: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(kept, new.astype(kept.dtype), start, axis=1)
