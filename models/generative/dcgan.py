"""DCGAN: an image generator and its discriminator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.conv_layers import ConvLayers

_KERNEL_INIT = nn.initializers.normal(0.02)


class DCGANGenerator(ConvLayers):
    """DCGAN generator: transposed convolutions, BatchNorm and ReLU from noise to images in [-1, 1].

    Radford et al., "Unsupervised representation learning with deep convolutional generative adversarial networks",
    https://arxiv.org/abs/1511.06434. With the defaults and noise of 100 values it is the generator of PyTorch's
    tutorial, with 3,576,704 parameters: no biases, and kernels of 4x4, which strides of 2 cover evenly. For images of
    28x28, use `features=(128, 64)`.

    Attributes:
      image_shape: height, width and channels of the images. Each entry of `features` doubles height and width.
      features: number of channels of the feature maps, from the smallest map to the largest.

    Raises:
      ValueError: if the noise does not have shape `(rows, values)`, or if height or width is not divisible by
        `2 ** len(features)`.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = DCGANGenerator(image_shape=(28, 28, 1), features=(16, 8))
    >>> noise = jnp.zeros((2, 10))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), noise)[0].shape
    (2, 28, 28, 1)
    """

    image_shape: Sequence[int] = (64, 64, 3)
    features: Sequence[int] = (512, 256, 128, 64)
    norm_momentum: float = 0.9
    norm_epsilon: float = 1e-5

    @nn.compact
    def __call__(self, noise: jax.Array, training: bool = False) -> jax.Array:
        """Returns one image per row of noise, float32 of shape `(rows, *image_shape)`; 100 values per row are usual."""
        if noise.ndim != 2:
            raise ValueError(f"DCGANGenerator expects noise of shape (rows, values). Received: shape {noise.shape}.")
        _check_image_shape("DCGANGenerator", self.image_shape, self.features)
        height, width, channels = self.image_shape
        scale = 2 ** len(self.features)
        first = (height // scale, width // scale, self.features[0])
        x = nn.Dense(math.prod(first), use_bias=False, kernel_init=_KERNEL_INIT, dtype=self.dtype,
                     param_dtype=self.param_dtype, name="project")(noise).reshape(-1, *first)
        x = nn.relu(self.batch_norm(x, training, name="project_norm"))
        for number, wide in enumerate(self.features[1:], 1):
            x = self._enlarged(x, wide, f"conv_{number}")
            x = nn.relu(self.batch_norm(x, training, name=f"norm_{number}"))
        x = self._enlarged(x, channels, "image")
        return nn.tanh(x.astype(jnp.promote_types(x.dtype, jnp.float32)))

    def _enlarged(self, x: jax.Array, channels: int, name: str) -> jax.Array:
        return nn.ConvTranspose(channels, (4, 4), strides=(2, 2), use_bias=False, kernel_init=_KERNEL_INIT,
                                dtype=self.dtype, param_dtype=self.param_dtype, name=name)(x)


class DCGANDiscriminator(ConvLayers):
    """DCGAN discriminator: strided convolutions, BatchNorm and leaky ReLU.

    The source is the same as for `DCGANGenerator`. With the defaults and images of 64x64x3 it has 2,765,568 parameters.
    Call it on real and generated images separately: in a mixed batch, the BatchNorm statistics reveal the share of real
    images.

    Attributes:
      features: number of channels of each convolution. Each convolution halves height and width.

    Raises:
      ValueError: if the images do not have shape `(rows, height, width, channels)`, or if height or width is not
        divisible by `2 ** len(features)`.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = DCGANDiscriminator(features=(8, 16))
    >>> images = jnp.zeros((2, 28, 28, 1))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), images)[0].shape
    (2, 1)
    """

    features: Sequence[int] = (64, 128, 256, 512)
    norm_momentum: float = 0.9
    norm_epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns a logit per image, high for real images: float32 of shape `(rows, 1)`."""
        if x.ndim != 4:
            raise ValueError("DCGANDiscriminator expects images of shape (rows, height, width, channels). Received: "
                             f"shape {x.shape}. Grey images need a channel axis: `images[..., None]`.")
        _check_image_shape("DCGANDiscriminator", x.shape[1:], self.features)
        for number, channels in enumerate(self.features):
            x = self.conv(x, channels, 4, 2, name=f"conv_{number}", kernel_init=_KERNEL_INIT)
            # As in the paper, the first layer has no BatchNorm: the discriminator sees the images' mean and scale.
            if number:
                x = self.batch_norm(x, training, name=f"norm_{number}")
            x = nn.leaky_relu(x, 0.2)
        logits = nn.Dense(1, use_bias=False, kernel_init=_KERNEL_INIT, dtype=self.dtype, param_dtype=self.param_dtype,
                          name="logit")(x.reshape(x.shape[0], -1))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _check_image_shape(name: str, shape: Sequence[int], features: Sequence[int]) -> None:
    scale = 2 ** len(features)
    if len(shape) != 3 or not features or any(side < scale or side % scale for side in shape[:2]):
        raise ValueError(f"{name} with {len(features)} convolutions expects images of shape (height, width, channels) "
                         f"whose sides are multiples of {scale}, and at least one convolution. Received: "
                         f"{tuple(shape)}. Pad the images, or give other `features`.")
