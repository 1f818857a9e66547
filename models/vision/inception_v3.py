"""InceptionV3: blocks of parallel convolution branches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import max_pool
from trainer.models.layers.image_model import ImageModel

# A convolution of a branch: number of channels, kernel height and kernel width.
_Layer = tuple[int, int, int]
_Branch = Sequence[_Layer]


class InceptionV3(ImageModel):
    """InceptionV3, for images of at least 75x75 pixels with values from -1 to 1.

    Szegedy et al., "Rethinking the Inception architecture for computer vision", https://arxiv.org/abs/1512.00567, as in
    `keras.applications`: 23,851,784 weights for 1000 classes.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model, images = InceptionV3(num_classes=10), jnp.zeros((2, 75, 75, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 10)
    """

    smallest_side: int = 75

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with about 1/32 of the height and width."""
        numbers = itertools.count()

        # Layers are numbered in call order, so the calls follow Keras's order.
        def conv(x: jax.Array, layer: _Layer, strides: int = 1, padding: str = "SAME") -> jax.Array:
            features, *kernel = layer
            number = next(numbers)
            suffix = f"_{number}" if number else ""
            x = self.conv(x, features, kernel, strides, name=f"conv2d{suffix}", padding=padding)
            return nn.relu(self.batch_norm(x, training, name=f"batch_normalization{suffix}", use_scale=False))

        def branch(x: jax.Array, layers: _Branch) -> jax.Array:
            for layer in layers:
                x = conv(x, layer)
            return x

        def mixed(x: jax.Array, branches: Sequence[_Branch], after_pool: int) -> jax.Array:
            outputs = [branch(x, layers) for layers in branches]
            return jnp.concatenate([*outputs, conv(_mean_pool(x), (after_pool, 1, 1))], -1)

        def halving(x: jax.Array, branches: Sequence[_Branch]) -> jax.Array:
            outputs = [conv(branch(x, layers[:-1]), layers[-1], 2, "VALID") for layers in branches]
            return jnp.concatenate([*outputs, max_pool(x, 3, 2)], -1)

        x = conv(x, (32, 3, 3), 2, "VALID")
        x = conv(x, (32, 3, 3), 1, "VALID")
        x = max_pool(conv(x, (64, 3, 3)), 3, 2)
        x = conv(x, (80, 1, 1), 1, "VALID")
        x = max_pool(conv(x, (192, 3, 3), 1, "VALID"), 3, 2)
        for after_pool in (32, 64, 64):
            x = mixed(x, [[(64, 1, 1)], [(48, 1, 1), (64, 5, 5)], [(64, 1, 1), (96, 3, 3), (96, 3, 3)]], after_pool)
        x = halving(x, [[(384, 3, 3)], [(64, 1, 1), (96, 3, 3), (96, 3, 3)]])
        for width in (128, 160, 160, 192):
            x = mixed(x, [[(192, 1, 1)], [(width, 1, 1), (width, 1, 7), (192, 7, 1)],
                          [(width, 1, 1), (width, 7, 1), (width, 1, 7), (width, 7, 1), (192, 1, 7)]], 192)
        x = halving(x, [[(192, 1, 1), (320, 3, 3)], [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)]])
        for _ in range(2):
            outputs = [conv(x, (320, 1, 1))]
            for layers in ([(384, 1, 1)], [(448, 1, 1), (384, 3, 3)]):
                stem = branch(x, layers)
                outputs += [conv(stem, (384, 1, 3)), conv(stem, (384, 3, 1))]
            x = jnp.concatenate([*outputs, conv(_mean_pool(x), (192, 1, 1))], -1)
        return x


def _mean_pool(x: jax.Array) -> jax.Array:
    """Returns the means of 3x3 windows, without the padding."""
    return nn.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME", count_include_pad=False)
