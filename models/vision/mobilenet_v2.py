"""MobileNetV2: inverted residuals with linear bottlenecks."""

from __future__ import annotations

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, relu6, round_channels, stride_padding
from trainer.models.layers.image_model import ImageModel

# Channels, strides of the first block, and number of blocks; all but the first stage expand sixfold.
_STAGES = ((16, 1, 1), (24, 2, 2), (32, 2, 3), (64, 2, 4), (96, 1, 3), (160, 2, 3), (320, 1, 1))


class InvertedResidual(ConvLayers):
    """Expansion, depthwise convolution, and a linear projection to few channels.

    Attributes:
      features: number of output channels.
      expansion: expansion factor of the inner channels; 1 omits the expansion layer.
      strides: strides of the convolution.
    """

    features: int = 0
    expansion: int = 6
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, of shape `(rows, height, width, features)`."""
        inputs = x
        if self.expansion > 1:
            x = self.conv(x, self.expansion * x.shape[-1], 1, name="expand")
            x = relu6(self.batch_norm(x, training, name="expand_BN"))
        padding = stride_padding(x.shape, 3) if self.strides == 2 else "SAME"
        x = self.depthwise_conv(x, 3, self.strides, name="depthwise", padding=padding)
        x = relu6(self.batch_norm(x, training, name="depthwise_BN"))
        x = self.conv(x, self.features, 1, name="project")
        x = self.batch_norm(x, training, name="project_BN")
        return x + inputs if self.strides == 1 and inputs.shape[-1] == self.features else x


class MobileNetV2(ImageModel):
    """MobileNetV2, for images with values from -1 to 1.

    Sandler et al., "MobileNetV2: Inverted residuals and linear bottlenecks", https://arxiv.org/abs/1801.04381, as in
    `keras.applications`: 3,538,984 weights for 1000 classes.

    Attributes:
      alpha: multiplier for the number of channels of each layer.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = MobileNetV2(num_classes=10, alpha=0.35)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    alpha: float = 1.0
    norm_momentum: float = 0.999

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        x = self.conv(x, round_channels(32 * self.alpha), 3, 2, name="Conv1")
        x = relu6(self.batch_norm(x, training, name="bn_Conv1"))
        number = 0
        for channels, strides, blocks in _STAGES:
            for block in range(blocks):
                x = InvertedResidual(
                    features=round_channels(int(channels * self.alpha)), expansion=6 if number else 1,
                    strides=1 if block else strides, name=f"block_{number}" if number else "expanded_conv",
                    **self.layer_options)(x, training)
                number += 1
        x = self.conv(x, round_channels(1280 * max(self.alpha, 1.0)), 1, name="Conv_1")
        return relu6(self.batch_norm(x, training, name="Conv_1_bn"))
