"""A Transformer that reads whole texts, in the plan of BERT."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.checks import check
from trainer.models.layers.head import ClassifierActivation, classify
from trainer.models.text.transformer_blocks import (
    KERNEL_STDDEV,
    TransformerBlock,
    check_sizes,
    check_tokens,
    embedding,
    layer_norm,
)

_POOLINGS = (None, "first", "avg", "max")


class TransformerEncoder(nn.Module):
    """BERT: attention in both directions, LayerNorm after each part, learned positions and types of tokens.

    Devlin et al., "BERT: Pre-training of deep bidirectional Transformers", https://arxiv.org/abs/1810.04805. With the
    defaults and `vocab_size=30522`, the body and the pooler are BERT base, of 109,482,240 parameters. Dropout acts on
    the embeddings, on what each part adds and on the classifier's inputs; BERT drops attention weights too.

    Attributes:
      vocab_size: how many tokens there are.
      num_layers: how many blocks.
      d_model: how many features a position has.
      num_heads: how many heads each attention has; `d_model` is a multiple of it.
      max_len: the most tokens of a row.
      mlp_dim: width of the hidden layer of each block; `4 * d_model` by default.
      num_types: how many types of tokens there are, such as first and second sentence.
      mask_token: the token that pads rows, at which nothing looks; None if none does. An input `mask` takes its place.
      num_classes: number of outputs.
      include_top: whether the classifier follows: the pooler, dropout and a dense layer called "predictions". Without
        it the features of all positions come out.
      pooling: without the classifier, one vector for each row: "first" is BERT's pooler, a dense layer and tanh of the
        first position; "avg" and "max" are over the positions that are not masked.
      classifier_activation: applied to the classifier's outputs: "softmax", "sigmoid" or a function; None and "linear"
        return logits.
      dropout_rate: the fraction that is dropped in training.
      dtype: what the layers compute in; that of the parameters by default.
      param_dtype: the dtype of the parameters.

    Raises:
      TypeError: the tokens are no whole numbers.
      ValueError: they are not of shape `(rows, length)` or too long, `num_heads` does not divide `d_model`,
        `token_types` or `mask` has another shape, or `pooling` is unknown.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = TransformerEncoder(vocab_size=50, num_layers=2, d_model=32, num_heads=4, max_len=16, num_classes=3)
    >>> tokens = jnp.ones((2, 16), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
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
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, token_types: jax.Array | None = None, mask: jax.Array | None = None,
        training: bool = False,
    ) -> jax.Array:
        """Returns class probabilities, float32 of shape `(rows, num_classes)`; or logits, or features, see above.

        Args:
          tokens: whole numbers below `vocab_size`, of shape `(rows, length)`.
          token_types: whole numbers below `num_types`, of the same shape; 0 by default.
          mask: of the same shape, False or 0 where a row is padded; by default where it has the `mask_token`.
          training: whether to drop, by the stream "dropout".
        """
        self._check(tokens, token_types, mask)
        real = self._is_real(tokens, mask)
        x = self._embedded(tokens, token_types, training)
        for number in range(self.num_layers):
            x, _ = TransformerBlock(
                num_heads=self.num_heads, mlp_dim=self.mlp_dim or 4 * self.d_model, norm_first=False,
                norm_epsilon=1e-12, activation=functools.partial(nn.gelu, approximate=False),
                dropout_rate=self.dropout_rate, dtype=self.dtype, param_dtype=self.param_dtype,
                name=f"block_{number}")(x, real, training=training)
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
