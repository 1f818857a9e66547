"""MobileNetV3: inverted residuals from architecture search, squeeze and excitation, and hard activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, round_channels, stride_padding
from trainer.models.layers.head import classify
from trainer.models.layers.image_model import ImageModel, pooled
from trainer.models.layers.pixels import rescaled


class Block(NamedTuple):
    """A row of the paper's tables.

    Attributes:
      expansion: expansion factor of the inner channels.
      features: number of output channels for `alpha=1`.
      kernel_size: kernel size of the convolution.
      strides: strides of the convolution.
      squeezes: whether the block has squeeze and excitation.
      is_hard: whether the activation is hard swish; otherwise ReLU.
    """

    expansion: float
    features: int
    kernel_size: int
    strides: int
    squeezes: bool
    is_hard: bool


_SMALL = (
    Block(1, 16, 3, 2, True, False),
    Block(72 / 16, 24, 3, 2, False, False),
    Block(88 / 24, 24, 3, 1, False, False),
    Block(4, 40, 5, 2, True, True), *(Block(6, 40, 5, 1, True, True),) * 2,
    *(Block(3, 48, 5, 1, True, True),) * 2,
    Block(6, 96, 5, 2, True, True), *(Block(6, 96, 5, 1, True, True),) * 2,
)
_LARGE = (
    Block(1, 16, 3, 1, False, False),
    Block(4, 24, 3, 2, False, False), Block(3, 24, 3, 1, False, False),
    Block(3, 40, 5, 2, True, False), *(Block(3, 40, 5, 1, True, False),) * 2,
    Block(6, 80, 3, 2, False, True), Block(2.5, 80, 3, 1, False, True), *(Block(2.3, 80, 3, 1, False, True),) * 2,
    *(Block(6, 112, 3, 1, True, True),) * 2,
    Block(6, 160, 5, 2, True, True), *(Block(6, 160, 5, 1, True, True),) * 2,
)


class SqueezeExcite(ConvLayers):
    """Scales each channel by a factor in [0, 1], computed from the means of all channels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of `x`."""
        channels = x.shape[-1]
        scale = pooled(x, "avg")[:, None, None]
        scale = nn.relu(self.conv(scale, round_channels(0.25 * channels), 1, name="conv", use_bias=True))
        return x * nn.hard_sigmoid(self.conv(scale, channels, 1, name="conv_1", use_bias=True))


class InvertedResidual(ConvLayers):
    """Expansion, depthwise convolution, and a linear projection to few channels.

    Attributes:
      features: number of output channels.
      expanded: number of inner channels.
      expands: whether the block has an expansion layer.
      kernel_size: kernel size of the depthwise convolution.
      strides: strides of the depthwise convolution.
      squeezes: whether squeeze and excitation follows the depthwise convolution.
      is_hard: whether the activation is hard swish; otherwise ReLU.
    """

    features: int = 0
    expanded: int = 0
    expands: bool = True
    kernel_size: int = 3
    strides: int = 1
    squeezes: bool = False
    is_hard: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, of shape `(rows, height, width, features)`."""
        inputs, activation = x, nn.hard_swish if self.is_hard else nn.relu
        if self.expands:
            x = self.conv(x, self.expanded, 1, name="expand")
            x = activation(self.batch_norm(x, training, name="expand_bn"))
        padding = stride_padding(x.shape, self.kernel_size) if self.strides == 2 else "SAME"
        x = self.depthwise_conv(x, self.kernel_size, self.strides, name="depthwise", padding=padding)
        x = activation(self.batch_norm(x, training, name="depthwise_bn"))
        if self.squeezes:
            x = SqueezeExcite(name="squeeze_excite", **self.layer_options)(x)
        x = self.conv(x, self.features, 1, name="project")
        x = self.batch_norm(x, training, name="project_bn")
        return x + inputs if self.strides == 1 and inputs.shape[-1] == self.features else x


class MobileNetV3(ImageModel):
    """Base class of `MobileNetV3Small` and `MobileNetV3Large`, for images with values from 0 to 255.

    Howard et al., "Searching for MobileNetV3", https://arxiv.org/abs/1905.02244, as in `keras.applications`. The
    classifier has two convolutions, "conv_2" and "logits".

    Attributes:
      alpha: multiplier for the number of channels of the blocks.
      minimalistic: whether to use only 3x3 kernels and ReLU, without squeeze and excitation.
      include_preprocessing: whether the model scales pixels to [-1, 1]; otherwise it expects scaled images.
      blocks: the blocks of the model.
      head_features: number of channels of the layer before the classifier; scaled by `alpha` above 1.
    """

    alpha: float = 1.0
    minimalistic: bool = False
    include_preprocessing: bool = True
    dropout_rate: float = 0.2
    norm_momentum: float = 0.999
    blocks: Sequence[Block] = ()
    head_features: int = 0

    def activation(self, x: jax.Array) -> jax.Array:
        """Applies the activation of the layers outside the blocks."""
        return nn.relu(x) if self.minimalistic else nn.hard_swish(x)

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        if self.include_preprocessing:
            x = rescaled(x, 1 / 127.5, -1.0)
        x = self.conv(x, 16, 3, 2, name="conv")
        x = self.activation(self.batch_norm(x, training, name="conv_bn"))
        for number, block in enumerate(self.blocks):
            x = InvertedResidual(
                features=round_channels(block.features * self.alpha),
                expanded=round_channels(x.shape[-1] * block.expansion), expands=number > 0,
                kernel_size=3 if self.minimalistic else block.kernel_size, strides=block.strides,
                squeezes=block.squeezes and not self.minimalistic, is_hard=block.is_hard and not self.minimalistic,
                name=f"expanded_conv_{number}" if number else "expanded_conv", **self.layer_options)(x, training)
        x = self.conv(x, round_channels(6 * x.shape[-1]), 1, name="conv_1")
        return self.activation(self.batch_norm(x, training, name="conv_1_bn"))

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map."""
        features = round_channels(self.head_features * self.alpha) if self.alpha > 1 else self.head_features
        x = pooled(x, "avg")[:, None, None]
        x = self.activation(self.conv(x, features, 1, name="conv_2", use_bias=True))
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        x = self.conv(x, self.num_classes, 1, name="logits", use_bias=True)
        return classify(x[:, 0, 0], self.classifier_activation)


class MobileNetV3Small(MobileNetV3):
    """The small MobileNetV3, for images with values from 0 to 255: 2,554,968 weights for 1000 classes.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = MobileNetV3Small(num_classes=10, alpha=0.35)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    blocks: Sequence[Block] = _SMALL
    head_features: int = 1024


class MobileNetV3Large(MobileNetV3):
    """The large MobileNetV3, for images with values from 0 to 255: 5,507,432 weights for 1000 classes.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = MobileNetV3Large(num_classes=10, alpha=0.35)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    blocks: Sequence[Block] = _LARGE
    head_features: int = 1280
