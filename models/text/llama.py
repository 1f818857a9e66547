"""The Transformer language model of the Llama family."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from trainer.losses.linear_logits import LinearLogits
from trainer.models.layers.dot_product_attention import AttentionImplementation, dot_product_attention
from trainer.models.text.causal_lm import CausalLM
from trainer.models.text.transformer_blocks import (
    KERNEL_STDDEV,
    Cache,
    check_sizes,
    check_tokens,
    embedding,
    extended,
)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of the frequencies of rotary positions, for texts longer than in the pretraining, as in Llama 3.1.

    Wavelengths above `original_max_len / low_freq_factor` are multiplied by `factor`, wavelengths below
    `original_max_len / high_freq_factor` stay, and the rest is interpolated. "The Llama 3 herd of models",
    https://arxiv.org/abs/2407.21783; the formula is from https://github.com/meta-llama/llama-models.

    Attributes:
      factor: factor of long wavelengths.
      low_freq_factor: see above.
      high_freq_factor: see above.
      original_max_len: number of tokens per row in the pretraining.

    Example:

    >>> Llama3Scaling(factor=32.0)
    Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def scaled(self, frequencies: jax.Array) -> jax.Array:
        """Returns scaled frequencies, in radians per position."""
        turns = self.original_max_len * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotated(x: jax.Array, positions: jax.Array, theta: float, scaling: Llama3Scaling | None = None) -> jax.Array:
    """Returns `x` with each pair of features rotated by an angle proportional to the position.

    Su et al., "RoFormer: Enhanced Transformer with rotary position embedding", https://arxiv.org/abs/2104.09864. As in
    Hugging Face's weights, feature `i` of the first half and of the second half are a pair. The rotation is computed in
    at least float32.

    Args:
      x: queries or keys, of shape `(rows, length, heads, features)`.
      positions: positions, of shape `(length,)`.
      theta: base of the wavelengths, which are between `2 pi` and `2 pi theta` positions.
      scaling: scaling of the frequencies.
    """
    half = x.shape[-1] // 2
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = theta ** -(jnp.arange(half, dtype=dtype) / half)
    angles = positions[:, None, None] * (frequencies if scaling is None else scaling.scaled(frequencies))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def dense(features: int, name: str, dtype: DTypeLike, param_dtype: DTypeLike) -> nn.Dense:
    """Returns a dense layer without a bias."""
    return nn.Dense(features, use_bias=False, kernel_init=nn.initializers.normal(KERNEL_STDDEV), dtype=dtype,
                    param_dtype=param_dtype, name=name)


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions, and keys and values that groups of heads share.

    Ainslie et al., "GQA: Training generalized multi-query Transformer models", https://arxiv.org/abs/2305.13245.

    Attributes:
      num_heads: number of heads of the queries. The features are divided among these heads.
      num_kv_heads: number of heads of keys and values, each for `num_heads / num_kv_heads` heads of queries.
      rope_theta: base of the wavelengths of rotary positions.
      rope_scaling: scaling of their frequencies.
      implementation: kernel of the attention, as in `dot_product_attention`. With a cache, it is XLA's.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.
    """

    num_heads: int
    num_kv_heads: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    implementation: AttentionImplementation = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: Cache | None = None, start: int | jax.Array = 0
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the outputs, of the shape of `x`, and the cache with the rotated keys and the values of `x`.

        Args:
          x: array of shape `(rows, length, features)`.
          cache: rotated keys, and values, of earlier positions, if `x` follows them.
          start: position of the first element of `x`.
        """
        features = x.shape[-1]
        size = features // self.num_heads

        def heads(name: str, count: int) -> jax.Array:
            y = dense(count * size, name, self.dtype, self.param_dtype)(x)
            return y.reshape(*x.shape[:-1], count, size)

        query, key = heads("query", self.num_heads), heads("key", self.num_kv_heads)
        value = heads("value", self.num_kv_heads)
        positions = start + jnp.arange(x.shape[1])
        query, key = (rotated(part, positions, self.rope_theta, self.rope_scaling) for part in (query, key))
        allowed = None
        if cache is not None:
            cache, allowed = extended(cache, key, value, start)
            key, value = cache
        outputs = dot_product_attention(
            query, key.astype(query.dtype), value.astype(query.dtype), allowed, cache is None,
            self.implementation if cache is None else "xla")
        return dense(features, "out", self.dtype, self.param_dtype)(outputs.reshape(x.shape)), cache


class LlamaBlock(nn.Module):
    """Self-attention and a gated MLP, each with RMSNorm of its inputs and a residual connection.

    Attributes:
      mlp_dim: width of the hidden layer. Shazeer, "GLU variants improve Transformer", https://arxiv.org/abs/2002.05202.
      norm_epsilon: value that RMSNorm adds to the mean square.
      num_heads, num_kv_heads, rope_theta, rope_scaling, implementation, dtype, param_dtype: as in `LlamaAttention`.
    """

    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    norm_epsilon: float
    implementation: AttentionImplementation = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: Cache | None = None, start: int | jax.Array = 0
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the outputs, of the shape of `x`, and the cache, as in `LlamaAttention`."""
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        attention = LlamaAttention(self.num_heads, self.num_kv_heads, self.rope_theta, self.rope_scaling,
                                   self.implementation, **options, name="attention")
        y, cache = attention(nn.RMSNorm(self.norm_epsilon, **options, name="attention_norm")(x), cache, start)
        x = x + y
        y = nn.RMSNorm(self.norm_epsilon, **options, name="mlp_norm")(x)
        gate, up = (dense(self.mlp_dim, name, **options)(y) for name in ("mlp_gate", "mlp_up"))
        return x + dense(x.shape[-1], "mlp_down", **options)(nn.silu(gate) * up), cache


class Llama(CausalLM):
    """Llama 2 and 3: causal attention with rotary positions and shared keys and values, RMSNorm, and gated MLPs.

    Touvron et al., "Llama 2: Open foundation and fine-tuned chat models", https://arxiv.org/abs/2307.09288, and "The
    Llama 3 herd of models", https://arxiv.org/abs/2407.21783. The defaults are Llama 2 7B; subclasses such as
    `Llama31_8B` define other sizes. `trainer.models.generate` generates text, `load_hf_weights` loads published
    weights, and `compile(remat=True)` recomputes activations.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      num_layers: number of blocks.
      d_model: number of features per position.
      num_heads: number of heads of the queries; must divide `d_model`, into even numbers of features.
      num_kv_heads: number of heads of keys and values; must divide `num_heads`, which is the default.
      mlp_dim: width of each block's hidden layer.
      max_len: maximum number of tokens per row. No parameter depends on it.
      rope_theta: base of the wavelengths of rotary positions.
      rope_scaling: scaling of their frequencies, as in Llama 3.1; None for none.
      norm_epsilon: value that RMSNorm adds to the mean square.
      tied_embedding: whether the output layer is the table of the token embedding, instead of a layer "head".
      attention: kernel of the attention: "auto" (on NVIDIA GPUs in 16 bits, cuDNN's, which stores no scores) or "xla".
      logits_chunk_size: number of positions whose logits the loss computes at a time in training, from
        `trainer.losses.LinearLogits`; None returns all logits.
      dtype: dtype of the computation; the dtype of the parameters by default.
      param_dtype: dtype of the parameters.

    Raises:
      TypeError: if the tokens are not integers.
      ValueError: if the tokens do not have shape `(rows, length)` or are too long, or the numbers of heads do not
        divide.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = Llama(vocab_size=50, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, mlp_dim=48, max_len=16)
    >>> tokens = jnp.zeros((2, 16), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 16, 50)
    """

    vocab_size: int = 32000
    num_layers: int = 32
    d_model: int = 4096
    num_heads: int = 32
    num_kv_heads: int | None = None
    mlp_dim: int = 11008
    max_len: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    norm_epsilon: float = 1e-5
    tied_embedding: bool = False
    attention: AttentionImplementation = "auto"
    logits_chunk_size: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self) -> None:
        """Creates the layers."""
        check_sizes("Llama", self.d_model, self.num_heads)
        if self.d_model // self.num_heads % 2:
            raise ValueError("Llama rotates pairs of features: each head must have an even number of them. Received: "
                             f"d_model={self.d_model}, num_heads={self.num_heads}.")
        if self.num_heads % self._kv_heads:
            raise ValueError("Llama shares keys and values among its heads: `num_heads` must be a multiple of "
                             f"`num_kv_heads`. Received: num_heads={self.num_heads}, "
                             f"num_kv_heads={self.num_kv_heads}.")
        self.token_embedding = embedding(self.vocab_size, self.d_model, self.dtype, self.param_dtype)
        self.blocks = [LlamaBlock(
            num_heads=self.num_heads, num_kv_heads=self._kv_heads, mlp_dim=self.mlp_dim, rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling, norm_epsilon=self.norm_epsilon, implementation=self.attention,
            dtype=self.dtype, param_dtype=self.param_dtype, name=f"block_{number}")
            for number in range(self.num_layers)]
        self.final_norm = nn.RMSNorm(epsilon=self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype)
        if not self.tied_embedding:
            self.head = embedding(self.vocab_size, self.d_model, self.dtype, self.param_dtype)

    def __call__(self, tokens: jax.Array, training: bool = False) -> jax.Array | LinearLogits:
        """Returns the logits of the token after each position, float32 of shape `(rows, length, vocab_size)`.

        Args:
          tokens: integers below `vocab_size`, of shape `(rows, length)`.
          training: whether to return `LinearLogits` if `logits_chunk_size` is given. Llama has no dropout.
        """
        x = self._embedded(tokens, 0, training)
        for block in self.blocks:
            x, _ = block(x)
        return self._logits(x, training)

    @property
    def _kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def _embedded(self, tokens: jax.Array, start: int | jax.Array, training: bool) -> jax.Array:
        check_tokens("Llama", tokens, self.max_len)
        x: jax.Array = self.token_embedding(tokens)
        return x

    @property
    def _table(self) -> jax.Array:
        table: jax.Array = (self.token_embedding if self.tied_embedding else self.head).embedding
        return table


class Llama2_7B(Llama):
    """Llama 2 7B, with 6,738,415,616 parameters."""


class Llama31_8B(Llama):
    """Llama 3.1 8B, with 8,030,261,248 parameters. Llama 3 8B is `Llama31_8B(rope_scaling=None, max_len=8192)`."""

    vocab_size: int = 128256
    num_kv_heads: int | None = 8
    mlp_dim: int = 14336
    max_len: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: Llama3Scaling | None = Llama3Scaling()


class Llama32_1B(Llama):
    """Llama 3.2 1B, with 1,235,814,400 parameters."""

    vocab_size: int = 128256
    num_layers: int = 16
    d_model: int = 2048
    num_kv_heads: int | None = 8
    mlp_dim: int = 8192
    max_len: int = 131072
    rope_theta: float = 500000.0
    rope_scaling: Llama3Scaling | None = Llama3Scaling(factor=32.0)
    tied_embedding: bool = True
