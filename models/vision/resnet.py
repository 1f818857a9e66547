"""ResNet: blocks with residual connections."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, max_pool
from trainer.models.layers.image_model import ImageModel

_STYLES = ("keras", "torchvision")


class ResidualBlock(ConvLayers):
    """Convolutions with a residual connection, then a ReLU.

    Attributes:
      features: number of channels of the 3x3 convolution.
      strides: strides of the first convolution, or of the second in torchvision's bottlenecks.
      bottleneck: whether the kernels are 1, 3 and 1, with four times the channels in the last; otherwise 3 and 3.
      style: "keras" or "torchvision", as in `ResNet`.
    """

    features: int = 0
    strides: int = 1
    bottleneck: bool = True
    style: str = "keras"

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the block's outputs, with `features` channels, or four times as many for a bottleneck."""
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
        # Layers in Keras's order, to compare the weights in tests.
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
    """ResNet, for images in BGR order, minus ImageNet's means.

    He et al., "Deep residual learning for image recognition", https://arxiv.org/abs/1512.03385, as in
    `keras.applications`: the first 1x1 convolution of a stage has the strides.

    Attributes:
      blocks: number of blocks of each stage. The first stage has 64 channels, and each next stage twice as many.
      bottleneck: whether blocks have three convolutions instead of two.
      style: "keras" or "torchvision". In the style of torchvision, convolutions have no biases, the second convolution
        of a bottleneck has the strides, and images are normalized by ImageNet's means and standard deviations. Use it
        for `load_torch_weights`.
      norm_epsilon: value that BatchNorm adds to the variance; 1.001e-5 by default, or 1e-5 for torchvision.
      norm_momentum: decay rate of BatchNorm's running averages; 0.99 by default, or 0.9 for torchvision.

    Raises:
      ValueError: if `style` is unknown.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = ResNet18(num_classes=10)
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
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
        """Returns a feature map with 1/32 of the height and width."""
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
    """A `ResNet` of 18 layers, for images normalized by ImageNet's means and standard deviations.

    It is torchvision's model, because `keras.applications` has none: 11,689,512 parameters for 1000 classes.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    style: str = "torchvision"


class ResNet34(ResNet18):
    """A torchvision `ResNet` of 34 layers: 21,797,672 parameters for 1000 classes."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)


class ResNet50(ResNet):
    """A `ResNet` of 50 layers: 25,636,712 weights for 1000 classes."""


class ResNet101(ResNet):
    """A `ResNet` of 101 layers: 44,707,176 weights for 1000 classes."""

    blocks: tuple[int, ...] = (3, 4, 23, 3)


class ResNet152(ResNet):
    """A `ResNet` of 152 layers: 60,419,944 weights for 1000 classes."""

    blocks: tuple[int, ...] = (3, 8, 36, 3)
