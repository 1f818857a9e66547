"""A small convolutional network for small images: digits, Fashion-MNIST, CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import linen as nn

from trainer.models.layers.checks import check
from trainer.models.layers.head import ClassifierActivation, classify


class CNN(nn.Module):
    """Convolution, ReLU and 2x2 max pooling per entry of `features`, then one hidden dense layer.

    The plan is LeNet-5's (LeCun et al., "Gradient-based learning applied to document recognition", 1998), with
    today's ReLU, max pooling and 3x3 kernels.

    Attributes:
      num_classes: number of outputs.
      features: channels of each convolution; every one of them halves height and width.
      hidden: width of the dense layer.
      dropout_rate: fraction of the dense layer's outputs that is dropped in training.
      classifier_activation: applied to the outputs: "softmax", "sigmoid" or a function; None and "linear" return
        logits.

    Raises:
      ValueError: the input is not of shape `(batch, height, width, channels)`, or too small to be halved that often.

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

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the class probabilities, or logits, of `x`; dropout draws from the "dropout" stream in training."""
        # Flax would take a batch of grey images without a channel axis for one image of many channels.
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
