"""A language model: a Transformer that predicts each next token, in the plan of GPT-2."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.checks import check
from trainer.models.text.transformer_blocks import (
    KERNEL_STDDEV,
    Cache,
    TransformerBlock,
    check_sizes,
    check_tokens,
    embedding,
    layer_norm,
)


class TransformerLM(nn.Module):
    """GPT-2: causal attention, LayerNorm before each part, learned positions, and the token table as output layer.

    Radford et al., "Language models are unsupervised multitask learners", 2019. With the defaults and
    `vocab_size=50257` it is GPT-2 small, of 124,439,808 parameters. Dropout acts on the embeddings and on what each
    part adds; GPT-2 drops attention weights too. `trainer.models.generate` continues texts.

    Attributes:
      vocab_size: how many tokens there are.
      num_layers: how many blocks.
      d_model: how many features a position has.
      num_heads: how many heads each attention has; `d_model` is a multiple of it.
      max_len: the most tokens of a row.
      mlp_dim: width of the hidden layer of each block; `4 * d_model` by default.
      dropout_rate: the fraction that is dropped in training.
      dtype: what the layers compute in; that of the parameters by default.
      param_dtype: the dtype of the parameters.

    Raises:
      TypeError: the tokens are no whole numbers.
      ValueError: they are not of shape `(rows, length)` or too long, or `num_heads` does not divide `d_model`.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = TransformerLM(vocab_size=50, num_layers=2, d_model=32, num_heads=4, max_len=16)
    >>> tokens = jnp.zeros((2, 16), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 16, 50)
    """

    vocab_size: int
    num_layers: int = 12
    d_model: int = 768
    num_heads: int = 12
    max_len: int = 1024
    mlp_dim: int | None = None
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    def setup(self) -> None:
        """Makes the layers."""
        check_sizes("TransformerLM", self.d_model, self.num_heads)
        self.token_embedding = embedding(self.vocab_size, self.d_model, self.dtype, self.param_dtype)
        self.position_embedding = embedding(self.max_len, self.d_model, self.dtype, self.param_dtype, stddev=0.01)
        self.dropout = nn.Dropout(self.dropout_rate)
        # GPT-2's: the sum of what all parts add has the same variance for any number of blocks.
        self.blocks = [TransformerBlock(
            num_heads=self.num_heads, mlp_dim=self.mlp_dim or 4 * self.d_model, norm_first=True, norm_epsilon=1e-5,
            activation=functools.partial(nn.gelu, approximate=True), is_causal=True,
            out_stddev=KERNEL_STDDEV / (2 * max(1, self.num_layers)) ** 0.5, dropout_rate=self.dropout_rate,
            dtype=self.dtype, param_dtype=self.param_dtype, name=f"block_{number}")
            for number in range(self.num_layers)]
        self.final_norm = layer_norm(1e-5, self.dtype, self.param_dtype)

    def __call__(self, tokens: jax.Array, training: bool = False) -> jax.Array:
        """Returns the logits of the token after each position, float32 of shape `(rows, length, vocab_size)`.

        Args:
          tokens: whole numbers below `vocab_size`, of shape `(rows, length)`.
          training: whether to drop, by the stream "dropout".
        """
        x = self._embedded(tokens, 0, training)
        for block in self.blocks:
            x, _ = block(x, training=training)
        return self._logits(x)

    def next_logits(
        self, tokens: jax.Array, cache: list[Cache], start: int | jax.Array = 0
    ) -> tuple[jax.Array, list[Cache]]:
        """Returns the logits of the token after the last, `(rows, vocab_size)`, and the cache that has seen `tokens`.

        Args:
          tokens: what follows the tokens that the cache has seen, of shape `(rows, length)`.
          cache: from `empty_cache`, or from an earlier call.
          start: how many tokens the cache has seen.
        """
        x = self._embedded(tokens, start, training=False)
        new_cache: list[Any] = []
        for block, kept in zip(self.blocks, cache, strict=True):
            x, seen = block(x, cache=kept, start=start)
            new_cache.append(seen)
        return self._logits(x[:, -1]), new_cache

    def empty_cache(self, rows: int, length: int, dtype: Any) -> list[Cache]:
        """Returns the cache of each block, for rows of `length` tokens, that has seen none.

        Args:
          rows: how many rows.
          length: the most tokens that it can hold of each.
          dtype: of keys and values.
        """
        zeros = jnp.zeros((rows, length, self.num_heads, self.d_model // self.num_heads), dtype)
        return [(zeros, zeros) for _ in range(self.num_layers)]

    def _embedded(self, tokens: jax.Array, start: int | jax.Array, training: bool) -> jax.Array:
        check_tokens("TransformerLM", tokens, self.max_len)
        x = self.token_embedding(tokens) + self.position_embedding(start + jnp.arange(tokens.shape[1]))
        return self.dropout(x, deterministic=not training)

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.final_norm(x)
        # Summed in float32 at least: a loss exponentiates what a narrower sum would have rounded.
        table = self.token_embedding.embedding.astype(x.dtype)
        return jnp.dot(x, table.T, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
