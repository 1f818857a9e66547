"""DenseNet: each layer receives the outputs of all earlier layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, max_pool
from trainer.models.layers.image_model import ImageModel


class DenseLayer(ConvLayers):
    """A bottleneck that appends its outputs to its inputs.

    Attributes:
      growth_rate: number of appended channels.
    """

    growth_rate: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the inputs with `growth_rate` more channels."""
        inputs = x
        x = nn.relu(self.batch_norm(x, training, name="0_bn"))
        x = self.conv(x, 4 * self.growth_rate, 1, name="1_conv")
        x = nn.relu(self.batch_norm(x, training, name="1_bn"))
        return jnp.concatenate([inputs, self.conv(x, self.growth_rate, 3, name="2_conv")], axis=-1)


class Transition(ConvLayers):
    """Halves channels, height and width between two stages."""

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the halved feature map."""
        x = nn.relu(self.batch_norm(x, training, name="bn"))
        x = self.conv(x, x.shape[-1] // 2, 1, name="conv")
        return nn.avg_pool(x, (2, 2), strides=(2, 2))


class DenseNet(ImageModel):
    """DenseNet, for images normalized by ImageNet's means and standard deviations.

    Huang et al., "Densely connected convolutional networks", https://arxiv.org/abs/1608.06993, as in
    `keras.applications`.

    Attributes:
      blocks: number of layers of each stage.
      growth_rate: number of channels that each layer appends.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = DenseNet(num_classes=10, blocks=(2, 2), growth_rate=8)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth_rate: int = 32
    norm_epsilon: float = 1.001e-5

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        x = self.conv(x, 2 * self.growth_rate, 7, 2, name="conv1_conv", padding=[(3, 3), (3, 3)])
        x = nn.relu(self.batch_norm(x, training, name="conv1_bn"))
        x = max_pool(x, 3, 2, padding=[(1, 1), (1, 1)])
        for stage, layers in enumerate(self.blocks):
            if stage:
                x = Transition(name=f"pool{stage + 1}", **self.layer_options)(x, training)
            for layer in range(layers):
                x = DenseLayer(growth_rate=self.growth_rate, name=f"conv{stage + 2}_block{layer + 1}",
                               **self.layer_options)(x, training)
        return nn.relu(self.batch_norm(x, training, name="bn"))


class DenseNet121(DenseNet):
    """A `DenseNet` of 121 layers: 8,062,504 weights for 1000 classes."""


class DenseNet169(DenseNet):
    """A `DenseNet` of 169 layers: 14,307,880 weights for 1000 classes."""

    blocks: tuple[int, ...] = (6, 12, 32, 32)


class DenseNet201(DenseNet):
    """A `DenseNet` of 201 layers: 20,242,984 weights for 1000 classes."""

    blocks: tuple[int, ...] = (6, 12, 48, 32)
