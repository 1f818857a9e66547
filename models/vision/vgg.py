"""VGG: stacks of convolutions and a fully connected classifier."""

from __future__ import annotations

import jax
from flax import linen as nn

from trainer.models.layers.conv_layers import max_pool
from trainer.models.layers.image_model import ImageModel

_CHANNELS = (64, 128, 256, 512, 512)


class VGG(ImageModel):
    """VGG, for images in BGR order, minus ImageNet's means.

    Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition",
    https://arxiv.org/abs/1409.1556, as in `keras.applications`. The classifier flattens the feature map and accepts
    only images of the size at initialization.

    Attributes:
      convolutions: number of convolutions of each stage, for at most five stages.
      dropout_rate: dropout rate of the outputs of "fc1" and "fc2": 0 in Keras, 0.5 in the paper.

    Raises:
      ValueError: as in `ImageModel`, or if the images differ in size from the images at initialization of the
        classifier.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = VGG(include_top=False, pooling="avg", convolutions=(1, 1))
    >>> images = jnp.zeros((2, 32, 32, 3))
    >>> model.apply(model.init(jax.random.key(0), images), images).shape
    (2, 128)
    """

    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)

    def features(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns a feature map with 1/32 of the height and width."""
        for stage, convolutions in enumerate(self.convolutions):
            for number in range(convolutions):
                x = nn.relu(self.conv(x, _CHANNELS[stage], 3, name=f"block{stage + 1}_conv{number + 1}", use_bias=True))
            x = max_pool(x, 2, 2)
        return x

    def head(self, x: jax.Array, training: bool) -> jax.Array:
        """Returns the classifier's outputs for a feature map of the size at initialization."""
        x = x.reshape(x.shape[0], -1)
        kernel = self.variables.get("params", {}).get("fc1", {}).get("kernel")
        if kernel is not None and kernel.shape[0] != x.shape[1]:
            raise ValueError(f"{type(self).__name__} was made with images of another size, of {kernel.shape[0]} "
                             f"features. Received: images of {x.shape[1]} features. Resize them, or make the model for "
                             "their size; `include_top=False` takes any.")
        x = nn.relu(self.dense(x, 4096, name="fc1"))
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        return self.classified(nn.relu(self.dense(x, 4096, name="fc2")), training)


class VGG16(VGG):
    """A `VGG` of 16 layers: 138,357,544 parameters for 1000 classes and images of 224x224 pixels."""


class VGG19(VGG):
    """A `VGG` of 19 layers: 143,667,240 parameters for 1000 classes and images of 224x224 pixels."""

    convolutions: tuple[int, ...] = (2, 2, 4, 4, 4)
