"""The part that language models share: logits of the tokens that follow, all at once or one by one with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from trainer.losses.linear_logits import LinearLogits, linear_logits
from trainer.models.layers.zoo_module import ZooModule
from trainer.models.text.transformer_blocks import Cache


class CausalLM(ZooModule):
    """Base class of language models.

    A subclass has the attributes `num_layers`, `d_model`, `num_heads` and `logits_chunk_size`, creates
    `token_embedding`, `blocks` and `final_norm`, and defines `_embedded`.
    """

    def next_logits(
        self, tokens: jax.Array, cache: list[Cache], start: int | jax.Array = 0
    ) -> tuple[jax.Array, list[Cache]]:
        """Returns the logits of the next token, of shape `(rows, vocab_size)`, and the cache extended by `tokens`.

        Args:
          tokens: tokens that follow the cached tokens, of shape `(rows, length)`.
          cache: cache from `empty_cache` or an earlier call.
          start: number of cached tokens.
        """
        x = self._embedded(tokens, start, training=False)
        new_cache: list[Any] = []
        for block, kept in zip(self.blocks, cache, strict=True):
            x, seen = block(x, cache=kept, start=start)
            new_cache.append(seen)
        return linear_logits(self.final_norm(x[:, -1]), self._table.T), new_cache

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> list[Cache]:
        """Returns an empty cache for each block.

        Args:
          rows: number of rows.
          length: capacity in tokens per row.
          dtype: dtype of keys and values.
        """
        zeros = jnp.zeros((rows, length, self._kv_heads, self.d_model // self.num_heads), dtype)
        return [(zeros, zeros) for _ in range(self.num_layers)]

    def _logits(self, x: jax.Array, training: bool) -> jax.Array | LinearLogits:
        """Returns the logits for the outputs of the last block."""
        x = self.final_norm(x)
        if training and self.logits_chunk_size is not None:
            return LinearLogits(x, self._table.T, self.logits_chunk_size)
        return linear_logits(x, self._table.T)

    def _embedded(self, tokens: jax.Array, start: int | jax.Array, training: bool) -> jax.Array:
        """Returns the inputs of the first block for tokens at positions from `start` on."""
        raise NotImplementedError

    @property
    def _table(self) -> jax.Array:
        """The vectors of all tokens, by which the last layer multiplies."""
        table: jax.Array = self.token_embedding.embedding
        return table

    @property
    def _kv_heads(self) -> int:
        """Number of heads of keys and values."""
        count: int = self.num_heads
        return count
