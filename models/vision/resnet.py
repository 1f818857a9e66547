"""ResNets: blocks that add to their inputs."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, max_pool
from trainer.models.layers.image_model import ImageModel

_STYLES = ("keras", "torchvision")


class ResidualBlock(ConvLayers):
    """Convolutions whose outputs are added to the inputs, then a ReLU.

    Attributes:
      features: how many channels the convolution of size 3 has.
      strides: of the first convolution, or of the second in torchvision's blocks of three.
      bottleneck: convolutions of sizes 1, 3 and 1 with four times as many channels in the end; otherwise of 3 and 3.
      style: of whom; see `ResNet`.
    """

    features: int = 0
    strides: int = 1
    bottleneck: bool = True
    style: str = "keras"

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, with `features` channels, or four times as many of a bottleneck."""
        inputs = x
        if self.bottleneck:
            layers = [(1, self.features), (3, self.features), (1, 4 * self.features)]
        else:
            layers = [(3, self.features), (3, self.features)]
        *inner, (last_size, outputs) = layers
        striding = 2 if self.bottleneck and self.style == "torchvision" else 1
        for number, (size, features) in enumerate(inner, 1):
            strides = self.strides if number == striding else 1
            x = self._padded_conv(x, features, size, strides, name=f"{number}_conv")
            x = nn.relu(self.batch_norm(x, training, name=f"{number}_bn"))
        # As Keras orders the layers, with which tests compare them.
        projects = self.strides > 1 or inputs.shape[-1] != outputs
        if projects:
            inputs = self._padded_conv(inputs, outputs, 1, self.strides, name="0_conv")
        x = self._padded_conv(x, outputs, last_size, 1, name=f"{len(layers)}_conv")
        if projects:
            inputs = self.batch_norm(inputs, training, name="0_bn")
        return nn.relu(inputs + self.batch_norm(x, training, name=f"{len(layers)}_bn"))

    def _padded_conv(self, x: jax.Array, features: int, size: int, strides: int, name: str) -> jax.Array:
        return self.conv(x, features, size, strides, name=name, padding=[(size // 2, size // 2)] * 2,
                         use_bias=self.style == "keras")


class ResNet(ImageModel):
    """A ResNet, for images in the order blue, green, red, minus the means of ImageNet.

    He et al., "Deep residual learning for image recognition", https://arxiv.org/abs/1512.03385, as
    `keras.applications` has it: a stage's first convolution of size 1 has the strides.

    Attributes:
      blocks: how many blocks each stage has; the first has 64 channels, and each next one twice as many.
      bottleneck: blocks of three convolutions instead of two.
      style: "keras", or "torchvision", whose convolutions have no biases, and whose blocks of three have the strides in
        the second: for `load_torch_weights`, and images normalized by the means and deviations of ImageNet.
      norm_epsilon: what BatchNorm adds to the variance; by default that of the style: 1.001e-5 or 1e-5.
      norm_momentum: what is kept of running averages in a step; by default that of the style: 0.99 or 0.9.

    Raises:
      ValueError: `style` is neither.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = ResNet18(num_classes=10)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> model.apply(model.init(jax.random.key(0), images), images).shape
    (2, 10)
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    style: str = "keras"
    norm_epsilon: Any = None
    norm_momentum: Any = None

    def __post_init__(self) -> None:
        is_torchvision = self.style == "torchvision"
        if self.norm_epsilon is None:
            self.norm_epsilon = 1e-5 if is_torchvision else 1.001e-5
        if self.norm_momentum is None:
            self.norm_momentum = 0.9 if is_torchvision else 0.99
        super().__post_init__()

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with a thirty-second of the height and width."""
        if self.style not in _STYLES:
            raise ValueError(f"`style` must be \"keras\" or \"torchvision\". Received: {self.style!r}.")
        x = self.conv(x, 64, 7, 2, name="conv1_conv", padding=[(3, 3), (3, 3)], use_bias=self.style == "keras")
        x = nn.relu(self.batch_norm(x, training, name="conv1_bn"))
        x = max_pool(x, 3, 2, padding=[(1, 1), (1, 1)])
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                x = ResidualBlock(
                    features=64 * 2**stage, strides=2 if stage and not block else 1, bottleneck=self.bottleneck,
                    style=self.style, name=f"conv{stage + 2}_block{block + 1}",
                    **self.layer_options)(x, training)
        return x


class ResNet18(ResNet):
    """A `ResNet` of 18 layers, for images normalized by the means and deviations of ImageNet.

    As torchvision has it, `keras.applications` having none: 11,689,512 parameters for 1000 classes.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    style: str = "torchvision"


class ResNet34(ResNet18):
    """A `ResNet` of 34 layers, see `ResNet18`: 21,797,672 parameters for 1000 classes."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)


class ResNet50(ResNet):
    """A `ResNet` of 50 layers: 25,636,712 values for 1000 classes."""


class ResNet101(ResNet):
    """A `ResNet` of 101 layers: 44,707,176 values for 1000 classes."""

    blocks: tuple[int, ...] = (3, 4, 23, 3)


class ResNet152(ResNet):
    """A `ResNet` of 152 layers: 60,419,944 values for 1000 classes."""

    blocks: tuple[int, ...] = (3, 8, 36, 3)
