"""A variational autoencoder of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.head import classify


class _Encoder(nn.Module):
    """Strided convolutions, a hidden layer, and the mean and log-variance of each latent value."""

    latent_dim: int
    features: Sequence[int]
    hidden: int
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for channels in self.features:
            x = nn.relu(nn.Conv(channels, (3, 3), strides=(2, 2), **options)(x))
        x = nn.relu(nn.Dense(self.hidden, **options)(x.reshape(x.shape[0], -1)))
        mean, log_variance = (classify(nn.Dense(self.latent_dim, **options, name=name)(x), None)
                              for name in ("mean", "log_variance"))
        return mean, log_variance


class _Decoder(nn.Module):
    """A dense layer, then the encoder's convolutions transposed, in reverse."""

    image_shape: Sequence[int]
    features: Sequence[int]
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, latents: jax.Array) -> jax.Array:
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        height, width, channels = self.image_shape
        scale = 2 ** len(self.features)
        first = (height // scale, width // scale, self.features[-1])
        x = nn.relu(nn.Dense(math.prod(first), **options)(latents)).reshape(-1, *first)
        for wide in reversed(self.features):
            x = nn.relu(nn.ConvTranspose(wide, (3, 3), strides=(2, 2), **options)(x))
        return nn.ConvTranspose(channels, (3, 3), **options)(x)


class VAE(nn.Module):
    """A convolutional encoder to a normal distribution of latent values, and a decoder of what is drawn from it.

    Kingma and Welling, "Auto-encoding variational Bayes", https://arxiv.org/abs/1312.6114; the plan of layers is that
    of Keras's example, https://keras.io/examples/generative/vae, of 134,165 parameters.

    Train it to return its input: `compile(loss="binary_crossentropy")`, `fit(images, images)`, values from 0 to 1. The
    divergence from the standard normal distribution is sown into "losses": the mean over rows, divided by the number of
    values of an image, as a loss is that is a mean over values. Their sum is then the negative evidence lower bound
    (ELBO) of a value.

    Attributes:
      image_shape: height, width and channels of the images; each entry of `features` halves height and width.
      latent_dim: how many latent values an image has.
      features: channels of the encoder's convolutions; the decoder has them in reverse.
      hidden: width of the encoder's dense layer.
      beta: what the divergence is multiplied by (Higgins et al., "beta-VAE", 2017).
      output_activation: applied to the decoder's outputs; None returns logits.
      dtype: what the layers compute in; that of inputs and parameters by default.
      param_dtype: the dtype of the parameters.

    Raises:
      ValueError: images have another shape than `image_shape`, or that cannot be halved so often.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> model = VAE(image_shape=(8, 8, 1), features=(4, 8), hidden=8)
    >>> images = jnp.zeros((3, 8, 8, 1))
    >>> variables = model.init(jax.random.key(0), images)
    >>> model.apply(variables, images).shape
    (3, 8, 8, 1)
    >>> mean, log_variance = model.apply(variables, images, method="encode")
    >>> model.apply(variables, mean, method="decode").shape
    (3, 8, 8, 1)
    """

    image_shape: Sequence[int] = (28, 28, 1)
    latent_dim: int = 2
    features: Sequence[int] = (32, 64)
    hidden: int = 16
    beta: float = 1.0
    output_activation: Callable[[jax.Array], jax.Array] | None = nn.sigmoid
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self) -> None:
        """Makes the two networks."""
        scale = 2 ** len(self.features)
        if len(self.image_shape) != 3 or not self.features or any(side % scale for side in self.image_shape[:2]):
            raise ValueError(f"VAE with {len(self.features)} convolutions expects an `image_shape` (height, width, "
                             f"channels) whose sides are multiples of {scale}, and at least one convolution. Received: "
                             f"{tuple(self.image_shape)}. Pad the images, or give other `features`.")
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        self.encoder = _Encoder(self.latent_dim, self.features, self.hidden, **options)
        self.decoder = _Decoder(self.image_shape, self.features, **options)

    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the reconstructions of images, of their shape, and sows the divergence into "losses".

        In training latent values are drawn, by the stream "latent"; otherwise they are the means.
        """
        latents, log_variance = self.encode(x)
        divergence = 0.5 * (jnp.exp(log_variance) + jnp.square(latents) - 1 - log_variance).sum(-1)
        if not self.is_initializing():
            self.sow("losses", "divergence", self.beta / math.prod(self.image_shape) * divergence.mean())
        if training:
            noise = jax.random.normal(self.make_rng("latent"), latents.shape, latents.dtype)
            latents = latents + jnp.exp(0.5 * log_variance) * noise
        return self.decode(latents)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns means and log-variances of the latent values of images: float32 of shape `(rows, latent_dim)`."""
        if x.shape[1:] != tuple(self.image_shape):
            raise ValueError(f"VAE expects images of shape (rows, {', '.join(map(str, self.image_shape))}). Received: "
                             f"shape {x.shape}. Give their shape as `image_shape`.")
        return self.encoder(x)

    def decode(self, latents: jax.Array) -> jax.Array:
        """Returns the images of latent values of shape `(rows, latent_dim)`: float32 of `(rows, *image_shape)`."""
        return classify(self.decoder(latents), self.output_activation)
