"""EfficientNet: inverted residuals with squeeze and excitation, scaled in width, depth and image size together."""

from __future__ import annotations

import math
import string

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, round_channels, stride_padding
from trainer.models.layers.head import classify
from trainer.models.layers.image_model import ImageModel, pooled
from trainer.models.layers.pixels import rescaled

# Kernel size, channels, strides of the first block, expansion, and number of blocks.
_STAGES = ((3, 16, 1, 1, 1), (3, 24, 2, 6, 2), (5, 40, 2, 6, 2), (3, 80, 2, 6, 3), (5, 112, 1, 6, 3), (5, 192, 2, 6, 4),
           (3, 320, 1, 6, 1))
_IMAGENET_STDDEV = (0.229, 0.224, 0.225)
_CONV = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
# "fan_in" here equals Keras's "fan_out" of a depthwise kernel.
_DEPTHWISE = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
_DENSE = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")


class Normalization(nn.Module):
    """Normalizes each channel by a mean and a standard deviation.

    Both are constants in the collection "constants": loaded with the weights, never trained. Without loaded weights
    they are 0 and 1, as in Keras.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape and dtype of `x`."""
        mean = self.variable("constants", "mean", jnp.zeros, x.shape[-1:]).value
        variance = self.variable("constants", "var", jnp.ones, x.shape[-1:]).value
        return ((x - mean) / jnp.maximum(jnp.sqrt(variance), 1e-7)).astype(x.dtype)


class InvertedResidual(ConvLayers):
    """Expansion, depthwise convolution, squeeze and excitation, and a linear projection to few channels.

    Attributes:
      features: number of output channels.
      kernel_size: kernel size of the depthwise convolution.
      strides: strides of the depthwise convolution.
      expansion: expansion factor of the inner channels; 1 omits the expansion layer.
      drop_rate: probability to skip the block for an image in training. Only blocks with a residual connection use it.
    """

    features: int = 0
    kernel_size: int = 3
    strides: int = 1
    expansion: int = 6
    drop_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, of shape `(rows, height, width, features)`."""
        inputs = x
        if self.expansion > 1:
            x = self.conv(x, self.expansion * x.shape[-1], 1, name="expand_conv", kernel_init=_CONV)
            x = nn.silu(self.batch_norm(x, training, name="expand_bn"))
        padding = stride_padding(x.shape, self.kernel_size) if self.strides == 2 else "SAME"
        x = self.depthwise_conv(x, self.kernel_size, self.strides, name="dwconv", padding=padding,
                                kernel_init=_DEPTHWISE)
        x = nn.silu(self.batch_norm(x, training, name="bn"))
        scale = pooled(x, "avg")[:, None, None]
        scale = self.conv(scale, max(1, inputs.shape[-1] // 4), 1, name="se_reduce", use_bias=True, kernel_init=_CONV)
        scale = self.conv(nn.silu(scale), x.shape[-1], 1, name="se_expand", use_bias=True, kernel_init=_CONV)
        x = self.conv(x * nn.sigmoid(scale), self.features, 1, name="project_conv", kernel_init=_CONV)
        x = self.batch_norm(x, training, name="project_bn")
        if self.strides > 1 or inputs.shape[-1] != self.features:
            return x
        return inputs + nn.Dropout(self.drop_rate, broadcast_dims=(1, 2, 3), deterministic=not training, name="drop")(x)


class EfficientNet(ImageModel):
    """Base class of `EfficientNetB0` to `EfficientNetB7`, for images with values from 0 to 255.

    Tan and Le, "EfficientNet: Rethinking model scaling for convolutional neural networks",
    https://arxiv.org/abs/1905.11946, as in `keras.applications`. The model divides the images by 255 and normalizes the
    channels by constants that are loaded with the weights.

    Attributes:
      width_coefficient: multiplier for the number of channels of B0's layers.
      depth_coefficient: multiplier for the number of blocks of B0's stages.
      drop_connect_rate: upper limit of the probability to skip a block for an image in training. The rate grows
        linearly from 0 at the first block.
      divides_by_sqrt_stddev: whether to also divide the normalized channels by the square roots of ImageNet's standard
        deviations, as `keras.applications` does with `weights="imagenet"`: its files store standard deviations in place
        of variances. Use True for these files and models trained from them, False for other Keras weights.
    """

    width_coefficient: float = 1.0
    depth_coefficient: float = 1.0
    dropout_rate: float = 0.2
    drop_connect_rate: float = 0.2
    divides_by_sqrt_stddev: bool = False

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        x = Normalization(name="normalization")(rescaled(x, 1 / 255))
        if self.divides_by_sqrt_stddev:
            x = x / jnp.sqrt(jnp.array(_IMAGENET_STDDEV, x.dtype))
        x = self.conv(x, self.channels(32), 3, 2, name="stem_conv", padding=stride_padding(x.shape, 3),
                      kernel_init=_CONV)
        x = nn.silu(self.batch_norm(x, training, name="stem_bn"))
        number, repeats = 0, [math.ceil(self.depth_coefficient * stage[-1]) for stage in _STAGES]
        for stage, (kernel_size, channels, strides, expansion, _) in enumerate(_STAGES):
            for block in range(repeats[stage]):
                x = InvertedResidual(
                    features=self.channels(channels), kernel_size=kernel_size, strides=1 if block else strides,
                    expansion=expansion, drop_rate=self.drop_connect_rate * number / sum(repeats),
                    name=f"block{stage + 1}{string.ascii_lowercase[block]}", **self.layer_options)(x, training)
                number += 1
        x = self.conv(x, self.channels(1280), 1, name="top_conv", kernel_init=_CONV)
        return nn.silu(self.batch_norm(x, training, name="top_bn"))

    def channels(self, channels: int) -> int:
        """Returns the scaled number of channels of a layer with `channels` channels in B0."""
        return round_channels(channels * self.width_coefficient)

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map."""
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(pooled(x, "avg"))
        x = self.dense(x, self.num_classes, name="predictions", kernel_init=_DENSE)
        return classify(x, self.classifier_activation)


class EfficientNetB0(EfficientNet):
    """EfficientNetB0, designed for images of 224x224 pixels: 5,330,570 weights for 1000 classes.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = EfficientNetB0(num_classes=10, width_coefficient=0.25, depth_coefficient=0.1)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """


class EfficientNetB1(EfficientNet):
    """EfficientNetB1, designed for images of 240x240 pixels: 7,856,238 weights for 1000 classes."""

    depth_coefficient: float = 1.1


class EfficientNetB2(EfficientNet):
    """EfficientNetB2, designed for images of 260x260 pixels: 9,177,568 weights for 1000 classes."""

    width_coefficient: float = 1.1
    depth_coefficient: float = 1.2
    dropout_rate: float = 0.3


class EfficientNetB3(EfficientNet):
    """EfficientNetB3, designed for images of 300x300 pixels: 12,320,534 weights for 1000 classes."""

    width_coefficient: float = 1.2
    depth_coefficient: float = 1.4
    dropout_rate: float = 0.3


class EfficientNetB4(EfficientNet):
    """EfficientNetB4, designed for images of 380x380 pixels: 19,466,822 weights for 1000 classes."""

    width_coefficient: float = 1.4
    depth_coefficient: float = 1.8
    dropout_rate: float = 0.4


class EfficientNetB5(EfficientNet):
    """EfficientNetB5, designed for images of 456x456 pixels: 30,562,526 weights for 1000 classes."""

    width_coefficient: float = 1.6
    depth_coefficient: float = 2.2
    dropout_rate: float = 0.4


class EfficientNetB6(EfficientNet):
    """EfficientNetB6, designed for images of 528x528 pixels: 43,265,142 weights for 1000 classes."""

    width_coefficient: float = 1.8
    depth_coefficient: float = 2.6
    dropout_rate: float = 0.5


class EfficientNetB7(EfficientNet):
    """EfficientNetB7, designed for images of 600x600 pixels: 66,658,686 weights for 1000 classes."""

    width_coefficient: float = 2.0
    depth_coefficient: float = 3.1
    dropout_rate: float = 0.5
