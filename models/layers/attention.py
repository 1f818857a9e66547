"""Multi-head self-attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.dot_product_attention import AttentionImplementation, dot_product_attention


class MultiHeadAttention(nn.Module):
    """Multi-head self-attention, with queries, keys and values from one dense layer, "qkv".

    Vaswani et al., "Attention is all you need", https://arxiv.org/abs/1706.03762.

    Attributes:
      num_heads: number of heads. The channels are divided among the heads.
      causal: whether each position attends only to itself and earlier positions.
      kernel_init: kernel initializer of both dense layers.
      implementation: kernel of the attention, as in `dot_product_attention`.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.

    Raises:
      ValueError: if the number of channels is not a multiple of `num_heads`.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> attention, x = MultiHeadAttention(num_heads=2), jnp.zeros((3, 5, 8))
    >>> attention.apply(attention.init(jax.random.key(0), x), x).shape
    (3, 5, 8)
    """

    num_heads: int
    causal: bool = False
    kernel_init: nn.initializers.Initializer = nn.initializers.glorot_uniform()
    implementation: AttentionImplementation = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of `x`: `(rows, positions, channels)`."""
        *leading, channels = x.shape
        if channels % self.num_heads:
            raise ValueError(f"The channels must be a multiple of `num_heads`. Received: {channels} channels and "
                             f"num_heads={self.num_heads}.")
        query_key_value = self._dense(3 * channels, "qkv")(x).reshape(*leading, 3, self.num_heads, -1)
        query, key, value = jnp.moveaxis(query_key_value, -3, 0)
        x = dot_product_attention(query, key, value, is_causal=self.causal, implementation=self.implementation)
        return self._dense(channels, "proj")(x.reshape(*leading, channels))

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, kernel_init=self.kernel_init, dtype=self.dtype, param_dtype=self.param_dtype,
                        name=name)
