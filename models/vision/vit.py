"""ViT, the vision Transformer: an image as a sequence of patches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.attention import MultiHeadAttention
from trainer.models.layers.conv_layers import ConvLayers
from trainer.models.layers.dot_product_attention import AttentionImplementation
from trainer.models.layers.head import classify
from trainer.models.layers.image_model import ImageModel, pooled

_INIT = nn.initializers.normal(0.02)


class EncoderBlock(ConvLayers):
    """Attention and an MLP, each with normalization of the inputs and a residual connection.

    Attributes:
      num_heads: number of attention heads.
      mlp_width: width of the MLP's hidden layer.
      dropout_rate: dropout rate of each part's outputs and of the MLP's hidden layer.
      attention: kernel of the attention, as in `dot_product_attention`.
      layer_norm_epsilon: value that LayerNorm adds to the variance.
    """

    num_heads: int = 12
    mlp_width: int = 3072
    dropout_rate: float = 0.0
    attention: AttentionImplementation = "auto"
    layer_norm_epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns an array of the shape of `x`: `(rows, tokens, channels)`."""
        y = self.layer_norm(x, name="norm1", epsilon=self.layer_norm_epsilon)
        y = MultiHeadAttention(self.num_heads, kernel_init=_INIT, implementation=self.attention, dtype=self.dtype,
                               param_dtype=self.param_dtype, name="attn")(y)
        x = x + self._dropped(y, training)
        y = self.layer_norm(x, name="norm2", epsilon=self.layer_norm_epsilon)
        y = nn.gelu(self.dense(y, self.mlp_width, name="mlp_fc1", kernel_init=_INIT), approximate=False)
        y = self.dense(self._dropped(y, training), x.shape[-1], name="mlp_fc2", kernel_init=_INIT)
        return x + self._dropped(y, training)

    def _dropped(self, x: jax.Array, training: bool) -> jax.Array:
        return nn.Dropout(self.dropout_rate, deterministic=not training)(x)


class ViT(ImageModel):
    """Vision Transformer of any size, for images with values from -1 to 1 and sides divisible by the patch size.

    Dosovitskiy et al., "An image is worth 16x16 words: Transformers for image recognition at scale",
    https://arxiv.org/abs/2010.11929. Subclasses such as `ViTB16` define the sizes. The path of a module, joined by
    underscores, is its name in timm with underscores for dots. Each position has its own embedding, so a model accepts
    only images of the size at initialization.

    Attributes:
      patch_size: height and width of a patch in pixels.
      width: number of channels per token.
      depth: number of blocks.
      num_heads: number of attention heads per block.
      mlp_width: width of the MLP's hidden layer in each block.
      include_top: whether to include the classifier, a dense layer called "head" on the class token. Otherwise the
        model returns all tokens, of shape `(rows, 1 + patches, width)`, class token first.
      pooling: pooling without the classifier: "avg" or "max" returns the mean or maximum of the patch tokens.
      dropout_rate: dropout rate of the embeddings and, in each block, of both parts' outputs and the MLP's hidden
        layer.
      attention: kernel of the attention: "auto" (on NVIDIA GPUs in 16 bits, cuDNN's, which stores no scores) or "xla".
      layer_norm_epsilon: value that LayerNorm adds to the variance: 1e-6 as in timm; Hugging Face's default is 1e-12.

    Raises:
      ValueError: if the sides of the images are not multiples of `patch_size`, or the weights have another number of
        patches.
    """

    patch_size: int = 16
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_width: int = 3072
    smallest_side: int = 1
    attention: AttentionImplementation = "auto"
    layer_norm_epsilon: float = 1e-6

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns tokens of shape `(rows, 1 + patches, width)`, class token first."""
        if any(side % self.patch_size for side in x.shape[1:3]):
            raise ValueError(f"{type(self).__name__} expects images whose height and width are multiples of "
                             f"{self.patch_size}. Received: shape {x.shape}. Resize or crop them.")
        x = self.conv(x, self.width, self.patch_size, self.patch_size, name="patch_embed_proj", padding="VALID",
                      use_bias=True)
        rows, height, width, channels = x.shape
        token = self.param("cls_token", nn.initializers.normal(1e-6), (1, 1, channels), self.param_dtype)
        x, token, positions = nn.dtypes.promote_dtype(x, token, self._positions(1 + height * width), dtype=self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (rows, 1, channels)), x.reshape(rows, -1, channels)], 1)
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x + positions)
        for block in range(self.depth):
            x = EncoderBlock(num_heads=self.num_heads, mlp_width=self.mlp_width, dropout_rate=self.dropout_rate,
                             attention=self.attention, layer_norm_epsilon=self.layer_norm_epsilon,
                             name=f"blocks_{block}", **self.layer_options)(x, training)
        return self.layer_norm(x, name="norm", epsilon=self.layer_norm_epsilon)

    def _positions(self, tokens: int) -> jax.Array:
        """Returns the position embeddings, of shape `(1, tokens, width)`."""
        if self.has_variable("params", "pos_embed"):
            found: int = self.get_variable("params", "pos_embed").shape[1]
            if found != tokens:
                raise ValueError(f"The weights of {type(self).__name__} are of images with {found - 1} patches. "
                                 f"Received: images with {tokens - 1}. Resize them to the size that the model was made "
                                 "with.")
        return self.param("pos_embed", _INIT, (1, tokens, self.width), self.param_dtype)

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for tokens."""
        logits = self.dense(x[:, 0], self.num_classes, name="head", kernel_init=_INIT)
        return classify(logits, self.classifier_activation)

    def headless(self, x: jax.Array) -> jax.Array:
        """Returns the tokens, or their pooled vector."""
        return x if self.pooling is None else pooled(x[:, 1:, None], self.pooling)


class ViTS16(ViT):
    """ViT-S/16, with 22,050,664 parameters for 1000 classes and images of 224x224.

    The size follows Touvron et al., "Training data-efficient image transformers", https://arxiv.org/abs/2012.12877.
    """

    width: int = 384
    num_heads: int = 6
    mlp_width: int = 1536


class ViTB16(ViT):
    """ViT-B/16, with 86,567,656 parameters for 1000 classes and images of 224x224.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = ViTB16(num_classes=10, width=16, depth=1, num_heads=2, mlp_width=32)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """


class ViTB32(ViT):
    """ViT-B/32, with 88,224,232 parameters for 1000 classes and images of 224x224."""

    patch_size: int = 32


class ViTL16(ViT):
    """ViT-L/16, with 304,326,632 parameters for 1000 classes and images of 224x224."""

    width: int = 1024
    depth: int = 24
    num_heads: int = 16
    mlp_width: int = 4096
