"""Xception: an Inception network of separable convolutions."""

from __future__ import annotations

import itertools

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import max_pool
from trainer.models.layers.image_model import ImageModel
from trainer.models.layers.separable_conv import SeparableConv

# Blocks that halve height and width: number, and channels of the first and second convolution.
_ENTRY = ((2, 128, 128), (3, 256, 256), (4, 728, 728))
_MIDDLE = range(5, 13)
_EXIT = (13, 728, 1024)


class Xception(ImageModel):
    """Xception, for images of at least 71x71 pixels with values from -1 to 1.

    Chollet, "Xception: Deep learning with depthwise separable convolutions", https://arxiv.org/abs/1610.02357, as in
    `keras.applications`: 22,910,480 weights for 1000 classes.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model, images = Xception(num_classes=10), jnp.zeros((2, 71, 71, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    smallest_side: int = 71

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        numbers = itertools.count()

        def separable(x: jax.Array, features: int, name: str) -> jax.Array:
            x = SeparableConv(features, 3, self.dtype, self.param_dtype, name=name)(x)
            return self.batch_norm(x, training, name=f"{name}_bn")

        def halving(x: jax.Array, block: int, first: int, second: int) -> jax.Array:
            number = next(numbers)
            suffix = f"_{number}" if number else ""  # Keras numbers unnamed layers
            shortcut = self.conv(x, second, 1, 2, name=f"conv2d{suffix}")
            shortcut = self.batch_norm(shortcut, training, name=f"batch_normalization{suffix}")
            x = separable(x if block == 2 else nn.relu(x), first, f"block{block}_sepconv1")
            x = separable(nn.relu(x), second, f"block{block}_sepconv2")
            return max_pool(x, 3, 2, "SAME") + shortcut

        for number, (channels, strides) in enumerate(((32, 2), (64, 1)), 1):
            x = self.conv(x, channels, 3, strides, name=f"block1_conv{number}", padding="VALID")
            x = nn.relu(self.batch_norm(x, training, name=f"block1_conv{number}_bn"))
        for block, first, second in _ENTRY:
            x = halving(x, block, first, second)
        for block in _MIDDLE:
            shortcut = x
            for part in (1, 2, 3):
                x = separable(nn.relu(x), x.shape[-1], f"block{block}_sepconv{part}")
            x = x + shortcut
        x = halving(x, *_EXIT)
        x = nn.relu(separable(x, 1536, "block14_sepconv1"))
        return nn.relu(separable(x, 2048, "block14_sepconv2"))
