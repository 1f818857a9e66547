"""ConvNeXt: a residual network in the style of a Transformer."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers
from trainer.models.layers.head import classify
from trainer.models.layers.image_model import ImageModel, pooled

# ImageNet's red, green and blue, for pixels from 0 to 255.
_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
_DEVIATION = (0.229 * 255, 0.224 * 255, 0.225 * 255)


class LayerScale(nn.Module):
    """Scales each channel by a learned factor.

    Touvron et al., "Going deeper with image transformers", https://arxiv.org/abs/2103.17239.

    Attributes:
      initial_value: initial value of the factors.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.
    """

    initial_value: float = 1e-6
    dtype: jnp.dtype | None = None
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of `x`, with channels last."""
        gamma = self.param("gamma", nn.initializers.constant(self.initial_value), x.shape[-1:], self.param_dtype)
        x, gamma = nn.dtypes.promote_dtype(x, gamma, dtype=self.dtype)
        return x * gamma


class ConvNeXtBlock(ConvLayers):
    """Depthwise convolution, then an MLP per pixel with four times the channels.

    Attributes:
      layer_scale_init_value: initial factor of the block's outputs; None omits the `LayerScale` layer.
      drop_path_rate: probability to skip the block for an image in training.
    """

    layer_scale_init_value: float | None = 1e-6
    drop_path_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, of the shape of `x`."""
        inputs, channels = x, x.shape[-1]
        x = self.depthwise_conv(x, 7, name="depthwise_conv", use_bias=True)
        x = self.layer_norm(x, name="layernorm")
        x = nn.gelu(self.dense(x, 4 * channels, name="pointwise_conv_1"), approximate=False)
        x = self.dense(x, channels, name="pointwise_conv_2")
        if self.layer_scale_init_value is not None:
            x = LayerScale(self.layer_scale_init_value, self.dtype, self.param_dtype, name="layer_scale")(x)
        # Stochastic depth: one draw per image.
        return inputs + nn.Dropout(self.drop_path_rate, broadcast_dims=(1, 2, 3), deterministic=not training)(x)


class ConvNeXt(ImageModel):
    """ConvNeXt of any size, for images with values from 0 to 255, with built-in normalization.

    Liu et al., "A ConvNet for the 2020s", https://arxiv.org/abs/2201.03545, as in `keras.applications`. Subclasses such
    as `ConvNeXtTiny` define the sizes.

    Attributes:
      depths: number of blocks of each of the four stages.
      widths: number of channels of each stage.
      layer_prefix: prefix of all layer names, as in Keras.
      include_preprocessing: whether to normalize images of three channels by ImageNet's mean and standard deviation.
        Otherwise the model expects normalized images.
      drop_path_rate: probability to skip the last block for an image in training. The rate grows linearly from 0 at the
        first block.
      layer_scale_init_value: initial factor of the blocks' outputs; None omits the `LayerScale` layers.
    """

    depths: Sequence[int] = (3, 3, 9, 3)
    widths: Sequence[int] = (96, 192, 384, 768)
    layer_prefix: str = "convnext"
    include_preprocessing: bool = True
    drop_path_rate: float = 0.0
    layer_scale_init_value: float | None = 1e-6

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        if self.include_preprocessing and x.shape[-1] == 3:
            x = _normalized(x)
        before, blocks = 0, sum(self.depths)
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            if stage == 0:
                x = self.conv(x, width, 4, 4, name=f"{self.layer_prefix}_stem_conv", padding="VALID", use_bias=True)
                x = self.layer_norm(x, name=f"{self.layer_prefix}_stem_layernorm")
            else:
                x = self.layer_norm(x, name=f"{self.layer_prefix}_downsampling_layernorm_{stage - 1}")
                x = self.conv(x, width, 2, 2, name=f"{self.layer_prefix}_downsampling_conv_{stage - 1}",
                              padding="VALID", use_bias=True)
            for block in range(depth):
                x = ConvNeXtBlock(
                    layer_scale_init_value=self.layer_scale_init_value,
                    drop_path_rate=self.drop_path_rate * (before + block) / max(blocks - 1, 1),
                    name=f"{self.layer_prefix}_stage_{stage}_block_{block}", **self.layer_options)(x, training)
            before += depth
        return x

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map."""
        x = self.layer_norm(pooled(x, "avg"), name=f"{self.layer_prefix}_head_layernorm")
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        logits = self.dense(x, self.num_classes, name=f"{self.layer_prefix}_head_dense")
        return classify(logits, self.classifier_activation)

    def headless(self, x: jax.Array) -> jax.Array:
        """Returns the normalized outputs of a model without a classifier, from a feature map."""
        return self.layer_norm(pooled(x, self.pooling), name="layer_normalization")


class ConvNeXtTiny(ConvNeXt):
    """ConvNeXt with 28,589,128 weights for 1000 classes.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = ConvNeXtTiny(num_classes=10, depths=(1, 1, 1, 1), widths=(8, 8, 16, 16))
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    layer_prefix: str = "convnext_tiny"


class ConvNeXtSmall(ConvNeXt):
    """ConvNeXt with 50,223,688 weights for 1000 classes."""

    depths: Sequence[int] = (3, 3, 27, 3)
    layer_prefix: str = "convnext_small"


class ConvNeXtBase(ConvNeXt):
    """ConvNeXt with 88,591,464 weights for 1000 classes."""

    depths: Sequence[int] = (3, 3, 27, 3)
    widths: Sequence[int] = (128, 256, 512, 1024)
    layer_prefix: str = "convnext_base"


class ConvNeXtLarge(ConvNeXt):
    """ConvNeXt with 197,767,336 weights for 1000 classes."""

    depths: Sequence[int] = (3, 3, 27, 3)
    widths: Sequence[int] = (192, 384, 768, 1536)
    layer_prefix: str = "convnext_large"


def _normalized(x: jax.Array) -> jax.Array:
    """Returns images of pixels from 0 to 255 as floating-point numbers with mean 0 and standard deviation 1."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
    wide = jnp.promote_types(dtype, jnp.float32)  # bfloat16 cannot represent the means exactly
    return ((x.astype(wide) - jnp.asarray(_MEAN, wide)) / jnp.asarray(_DEVIATION, wide)).astype(dtype)
