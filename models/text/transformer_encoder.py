"""A Transformer encoder for text, as in BERT."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.dot_product_attention import AttentionImplementation
from trainer.models.layers.head import ClassifierActivation, classify
from trainer.models.layers.zoo_module import ZooModule
from trainer.models.text.transformer_blocks import (
    KERNEL_STDDEV,
    TransformerBlock,
    check_sizes,
    check_tokens,
    embedding,
    layer_norm,
)

_POOLINGS = (None, "first", "avg", "max")


class TransformerEncoder(ZooModule):
    """BERT: bidirectional attention, LayerNorm after each part, learned positions and token types.

    Devlin et al., "BERT: Pre-training of deep bidirectional Transformers", https://arxiv.org/abs/1810.04805. With the
    defaults and `vocab_size=30522`, the body and the pooler are BERT base, with 109,482,240 parameters. Dropout applies
    to the embeddings, the outputs of each part and the classifier's inputs. BERT also drops attention weights.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      num_layers: number of blocks.
      d_model: number of features per position.
      num_heads: number of attention heads; must divide `d_model`.
      max_len: maximum number of tokens per row.
      mlp_dim: width of each block's hidden layer; `4 * d_model` by default.
      num_types: number of token types, such as first and second sentence.
      mask_token: padding token, which attention ignores; None for no padding. The input `mask` overrides it.
      num_classes: number of outputs.
      include_top: whether to include the classifier: the pooler, dropout and a dense layer called "predictions".
        Otherwise the model returns the features of all positions.
      pooling: pooling without the classifier, to one vector per row. "first" is BERT's pooler, a dense layer and tanh
        of the first position; "avg" and "max" pool the unmasked positions.
      classifier_activation: activation of the classifier: "softmax", "sigmoid" or a function; None and "linear" return
        logits.
      dropout_rate: dropout rate in training.
      attention: kernel of the attention: "auto" (on NVIDIA GPUs in 16 bits, cuDNN's, which stores no scores) or "xla".
      dtype: dtype of the computation; the dtype of the parameters by default.
      param_dtype: dtype of the parameters.

    Raises:
      TypeError: if the tokens are not integers.
      ValueError: if the tokens do not have shape `(rows, length)` or are too long, `num_heads` does not divide
        `d_model`, `token_types` or `mask` has another shape, or `pooling` is unknown.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = TransformerEncoder(vocab_size=50, num_layers=2, d_model=32, num_heads=4, max_len=16, num_classes=3)
    >>> tokens = jnp.ones((2, 16), jnp.int32)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), tokens)[0].shape
    (2, 3)
    """

    vocab_size: int
    num_layers: int = 12
    d_model: int = 768
    num_heads: int = 12
    max_len: int = 512
    mlp_dim: int | None = None
    num_types: int = 2
    mask_token: int | None = 0
    num_classes: int = 2
    include_top: bool = True
    pooling: str | None = None
    classifier_activation: ClassifierActivation = nn.softmax
    dropout_rate: float = 0.0
    attention: AttentionImplementation = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: jax.Array, token_types: jax.Array | None = None, mask: jax.Array | None = None,
        training: bool = False,
    ) -> jax.Array:
        """Returns class probabilities, float32 of shape `(rows, num_classes)`, logits, or features.

        Args:
          tokens: integers below `vocab_size`, of shape `(rows, length)`.
          token_types: integers below `num_types`, of the same shape; 0 by default.
          mask: array of the same shape, False or 0 at padding; by default, the positions of `mask_token` are padding.
          training: whether to apply dropout, from the "dropout" RNG stream.
        """
        self._check(tokens, token_types, mask)
        real = self._is_real(tokens, mask)
        x = self._embedded(tokens, token_types, training)
        for number in range(self.num_layers):
            x, _ = TransformerBlock(
                num_heads=self.num_heads, mlp_dim=self.mlp_dim or 4 * self.d_model, norm_first=False,
                norm_epsilon=1e-12, activation=functools.partial(nn.gelu, approximate=False),
                dropout_rate=self.dropout_rate, implementation=self.attention, dtype=self.dtype,
                param_dtype=self.param_dtype, name=f"block_{number}")(x, real, training=training)
        if not self.include_top:
            return self._pooled(x, real, self.pooling)
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(self._pooled(x, real, "first"))
        return classify(self._dense(self.num_classes, "predictions")(x), self.classifier_activation)

    def _embedded(self, tokens: jax.Array, token_types: jax.Array | None, training: bool) -> jax.Array:
        table = functools.partial(embedding, features=self.d_model, dtype=self.dtype, param_dtype=self.param_dtype)
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        x = (table(self.vocab_size, name="token_embedding")(tokens)
             + table(self.max_len, name="position_embedding")(jnp.arange(tokens.shape[1]))
             + table(self.num_types, name="type_embedding")(types))
        x = layer_norm(1e-12, self.dtype, self.param_dtype, name="embedding_norm")(x)
        return nn.Dropout(self.dropout_rate, deterministic=not training)(x)

    def _pooled(self, x: jax.Array, real: jax.Array | None, pooling: str | None) -> jax.Array:
        if pooling is None:
            return x
        if pooling == "first":
            return nn.tanh(self._dense(self.d_model, "pooler")(x[:, 0]))
        where = jnp.ones((*x.shape[:2], 1), bool) if real is None else real[..., None]
        if pooling == "max":
            return x.max(1, where=where, initial=jnp.finfo(x.dtype).min)
        return x.sum(1, where=where) / jnp.maximum(where.sum(1), 1).astype(x.dtype)

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, kernel_init=nn.initializers.normal(KERNEL_STDDEV), dtype=self.dtype,
                        param_dtype=self.param_dtype, name=name)

    def _is_real(self, tokens: jax.Array, mask: jax.Array | None) -> jax.Array | None:
        if mask is not None:
            return mask.astype(bool)
        return None if self.mask_token is None else tokens != self.mask_token

    def _check(self, tokens: jax.Array, token_types: jax.Array | None, mask: jax.Array | None) -> None:
        check_sizes("TransformerEncoder", self.d_model, self.num_heads)
        check_tokens("TransformerEncoder", tokens, self.max_len)
        for name, value in (("token_types", token_types), ("mask", mask)):
            if value is not None and value.shape != tokens.shape:
                raise ValueError(f"`{name}` must be of the shape of the tokens, {tokens.shape}. Received: shape "
                                 f"{value.shape}.")
        if self.pooling not in _POOLINGS:
            raise ValueError(f"`pooling` must be None, \"first\", \"avg\" or \"max\". Received: {self.pooling!r}.")
