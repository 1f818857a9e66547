"""A small convolutional network for small images, such as digits, Fashion-MNIST and CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import linen as nn

from trainer.models.layers.head import ClassifierActivation, classify
from trainer.models.layers.zoo_module import ZooModule


class CNN(ZooModule):
    """Convolution, ReLU and 2x2 max pooling per entry of `features`, then one hidden dense layer.

    The architecture is LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998) with
    ReLU, max pooling and 3x3 kernels.

    Attributes:
      num_classes: number of outputs.
      features: number of channels of each convolution. Each entry halves height and width.
      hidden: width of the dense layer.
      dropout_rate: dropout rate of the dense layer's outputs.
      classifier_activation: activation of the outputs: "softmax", "sigmoid" or a function; None and "linear" return
        logits.

    Raises:
      ValueError: if the input does not have shape `(batch, height, width, channels)`, or is too small for the number of
        convolutions.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = CNN(num_classes=10)
    >>> images = jnp.zeros((2, 28, 28, 1))
    >>> variables = model.init(jax.random.key(0), images)
    >>> model.apply(variables, images).shape
    (2, 10)
    """

    num_classes: int
    features: Sequence[int] = (32, 64)
    hidden: int = 128
    dropout_rate: float = 0.0
    classifier_activation: ClassifierActivation = nn.softmax

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns class probabilities or logits; in training, dropout draws from the "dropout" RNG stream."""
        # Without a channel axis, Flax would treat a batch of gray images as one image with many channels.
        if x.ndim != 4:
            raise ValueError(f"CNN expects images of shape (batch, height, width, channels). Received: shape {x.shape}."
                             " Grey images need a channel axis: `images[..., None]`.")
        smallest = 2 ** len(self.features)
        if min(x.shape[1:3]) < smallest:
            raise ValueError(f"CNN with {len(self.features)} convolutions expects images of at least "
                             f"{smallest}x{smallest} pixels. Received: shape {x.shape}. Give fewer `features`.")
        for channels in self.features:
            x = nn.relu(nn.Conv(channels, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        return classify(nn.Dense(self.num_classes, name="classifier")(x), self.classifier_activation)
