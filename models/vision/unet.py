"""U-Net: segmentation of images into classes, per pixel."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers, max_pool
from trainer.models.layers.head import ClassifierActivation, classify

_HE = nn.initializers.he_normal()


class ConvPair(ConvLayers):
    """Two convolutions, each followed by normalization and ReLU.

    Attributes:
      features: number of output channels.
    """

    features: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns an array of shape `(rows, height, width, features)`."""
        for part in (1, 2):
            x = self.conv(x, self.features, 3, name=f"conv{part}", kernel_init=_HE)
            x = nn.relu(self.batch_norm(x, training, name=f"bn{part}"))
        return x


class UNet(ConvLayers):
    """U-Net: class probabilities for each pixel of an image.

    Ronneberger et al., "U-Net: Convolutional networks for biomedical image segmentation",
    https://arxiv.org/abs/1505.04597, but with padding, so that outputs have the size of the images, and with batch
    normalization instead of biases: 31,037,698 parameters for images of 3 channels and 2 classes.

    Attributes:
      num_classes: number of classes.
      features: number of channels at each resolution, from the highest. Each entry after the first halves height and
        width.
      classifier_activation: activation of each pixel's outputs: "softmax", "sigmoid" or a function; None and "linear"
        return logits.
      dropout_rate: dropout rate at the lowest resolution.

    Raises:
      ValueError: if the input does not have shape `(rows, height, width, channels)`, or height or width is not a
        multiple of `2 ** (len(features) - 1)`.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = UNet(num_classes=2, features=(4, 8, 16))
    >>> images = jnp.zeros((1, 32, 48, 3))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (1, 32, 48, 2)
    """

    num_classes: int = 2
    features: Sequence[int] = (64, 128, 256, 512, 1024)
    classifier_activation: ClassifierActivation = nn.softmax
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns class probabilities or logits, of shape `(rows, height, width, num_classes)`."""
        if x.ndim != 4:
            raise ValueError("UNet expects images of shape (rows, height, width, channels). Received: shape "
                             f"{x.shape}. Grey images need a channel axis: `images[..., None]`.")
        multiple = 2 ** (len(self.features) - 1)
        if any(side % multiple for side in x.shape[1:3]):
            larger = "x".join(str(-(-side // multiple) * multiple) for side in x.shape[1:3])
            raise ValueError(f"UNet with {len(self.features)} resolutions expects images whose height and width are "
                             f"multiples of {multiple}. Received: shape {x.shape}. Pad or resize them to {larger}, or "
                             "give fewer `features`.")
        skipped = []
        for level, channels in enumerate(self.features):
            if level:
                skipped.append(x)
                x = max_pool(x, 2, 2)
            x = ConvPair(features=channels, name=f"down{level}", **self.layer_options)(x, training)
        x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        for level in reversed(range(len(skipped))):
            channels = self.features[level]
            x = nn.ConvTranspose(channels, (2, 2), strides=(2, 2), kernel_init=_HE, dtype=self.dtype,
                                 param_dtype=self.param_dtype, name=f"up{level}_transpose")(x)
            x = jnp.concatenate([skipped[level], x], -1)
            x = ConvPair(features=channels, name=f"up{level}", **self.layer_options)(x, training)
        x = self.conv(x, self.num_classes, 1, name="predictions", use_bias=True)
        return classify(x, self.classifier_activation)
