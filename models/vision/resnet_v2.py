"""ResNetV2: residual blocks with normalization before the convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, max_pool
from trainer.models.layers.image_model import ImageModel


class PreactivationBlock(ConvLayers):
    """Normalization, ReLU and a bottleneck of convolutions, with a residual connection.

    Attributes:
      features: number of channels of the bottleneck; the output has four times as many.
      strides: strides of the 3x3 convolution.
    """

    features: int = 0
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, with four times `features` channels."""
        inputs, strides = x, self.strides
        active = nn.relu(self.batch_norm(x, training, name="preact_bn"))
        x = self.conv(active, self.features, 1, name="1_conv")
        x = nn.relu(self.batch_norm(x, training, name="1_bn"))
        x = self.conv(x, self.features, 3, strides, name="2_conv", padding=[(1, 1), (1, 1)])
        x = nn.relu(self.batch_norm(x, training, name="2_bn"))
        # Layers in Keras's order: weight files without names are matched by order.
        if inputs.shape[-1] != 4 * self.features:
            inputs = self.conv(active, 4 * self.features, 1, strides, name="0_conv", padding="VALID", use_bias=True)
        else:
            inputs = inputs[:, ::strides, ::strides]
        return inputs + self.conv(x, 4 * self.features, 1, name="3_conv", use_bias=True)


class ResNetV2(ImageModel):
    """ResNet with normalization before the convolutions, for images with values from -1 to 1.

    He et al., "Identity mappings in deep residual networks", https://arxiv.org/abs/1603.05027, as in
    `keras.applications`: the last block of a stage has the strides.

    Attributes:
      blocks: number of blocks of each stage. The first stage has 64 channels, and each next stage twice as many.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = ResNetV2(num_classes=10, blocks=(1, 2))
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    norm_epsilon: float = 1.001e-5

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        x = self.conv(x, 64, 7, 2, name="conv1_conv", padding=[(3, 3), (3, 3)], use_bias=True)
        # Zeros, as in Keras: they affect the maxima, because no ReLU comes before.
        x = max_pool(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 3, 2)
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                ends = block == blocks - 1 and stage < len(self.blocks) - 1
                x = PreactivationBlock(
                    features=64 * 2**stage, strides=2 if ends else 1, name=f"conv{stage + 2}_block{block + 1}",
                    **self.layer_options)(x, training)
        return nn.relu(self.batch_norm(x, training, name="post_bn"))


class ResNet50V2(ResNetV2):
    """A `ResNetV2` of 50 layers: 25,613,800 weights for 1000 classes."""


class ResNet101V2(ResNetV2):
    """A `ResNetV2` of 101 layers: 44,675,560 weights for 1000 classes."""

    blocks: tuple[int, ...] = (3, 4, 23, 3)


class ResNet152V2(ResNetV2):
    """A `ResNetV2` of 152 layers: 60,380,648 weights for 1000 classes."""

    blocks: tuple[int, ...] = (3, 8, 36, 3)
