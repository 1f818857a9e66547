"""A Transformer language model, as in GPT-2."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.losses.linear_logits import LinearLogits
from trainer.models.layers.dot_product_attention import AttentionImplementation
from trainer.models.text.causal_lm import CausalLM
from trainer.models.text.transformer_blocks import (
    KERNEL_STDDEV,
    TransformerBlock,
    check_sizes,
    check_tokens,
    embedding,
    layer_norm,
)


class TransformerLM(CausalLM):
    """GPT-2: causal attention, LayerNorm before each part, learned positions and tied token embeddings.

    Radford et al., "Language models are unsupervised multitask learners", 2019. With the defaults and
    `vocab_size=50257` it is GPT-2 small, with 124,439,808 parameters. Dropout applies to the embeddings and the outputs
    of each part. GPT-2 also drops attention weights. `trainer.models.generate` generates text.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      num_layers: number of blocks.
      d_model: number of features per position.
      num_heads: number of attention heads; must divide `d_model`.
      max_len: maximum number of tokens per row.
      mlp_dim: width of each block's hidden layer; `4 * d_model` by default.
      dropout_rate: dropout rate in training.
      attention: kernel of the attention: "auto" (on NVIDIA GPUs in 16 bits, cuDNN's, which stores no scores) or "xla".
      logits_chunk_size: number of positions whose logits the loss computes at a time in training, from
        `trainer.losses.LinearLogits`; None returns all logits.
      dtype: dtype of the computation; the dtype of the parameters by default.
      param_dtype: dtype of the parameters.

    Raises:
      TypeError: if the tokens are not integers.
      ValueError: if the tokens do not have shape `(rows, length)` or are too long, or `num_heads` does not divide
        `d_model`.

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
    attention: AttentionImplementation = "auto"
    logits_chunk_size: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self) -> None:
        """Creates the layers."""
        check_sizes("TransformerLM", self.d_model, self.num_heads)
        self.token_embedding = embedding(self.vocab_size, self.d_model, self.dtype, self.param_dtype)
        self.position_embedding = embedding(self.max_len, self.d_model, self.dtype, self.param_dtype, stddev=0.01)
        self.dropout = nn.Dropout(self.dropout_rate)
        # As in GPT-2: the variance of the residual sum does not depend on the number of blocks.
        self.blocks = [TransformerBlock(
            num_heads=self.num_heads, mlp_dim=self.mlp_dim or 4 * self.d_model, norm_first=True, norm_epsilon=1e-5,
            activation=functools.partial(nn.gelu, approximate=True), is_causal=True,
            out_stddev=KERNEL_STDDEV / (2 * max(1, self.num_layers)) ** 0.5, dropout_rate=self.dropout_rate,
            implementation=self.attention, dtype=self.dtype, param_dtype=self.param_dtype, name=f"block_{number}")
            for number in range(self.num_layers)]
        self.final_norm = layer_norm(1e-5, self.dtype, self.param_dtype)

    def __call__(self, tokens: jax.Array, training: bool = False) -> jax.Array | LinearLogits:
        """Returns the logits of the token after each position, float32 of shape `(rows, length, vocab_size)`.

        Args:
          tokens: integers below `vocab_size`, of shape `(rows, length)`.
          training: whether to apply dropout, from the "dropout" RNG stream.
        """
        x = self._embedded(tokens, 0, training)
        for block in self.blocks:
            x, _ = block(x, training=training)
        return self._logits(x, training)

    def _embedded(self, tokens: jax.Array, start: int | jax.Array, training: bool) -> jax.Array:
        check_tokens("TransformerLM", tokens, self.max_len)
        x = self.token_embedding(tokens) + self.position_embedding(start + jnp.arange(tokens.shape[1]))
        return self.dropout(x, deterministic=not training)
