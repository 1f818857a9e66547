"""A variational autoencoder for images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.head import classify
from trainer.models.layers.zoo_module import ZooModule


class _Encoder(nn.Module):
    """Strided convolutions and a hidden layer, then the mean and log-variance of each latent value."""

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
    """A dense layer, then the transposed convolutions of the encoder in reverse order."""

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


class VAE(ZooModule):
    """Variational autoencoder: a convolutional encoder to a normal distribution, and a decoder of its samples.

    Kingma and Welling, "Auto-encoding variational Bayes", https://arxiv.org/abs/1312.6114. The layers are the same as
    in Keras's example, https://keras.io/examples/generative/vae, with 134,165 parameters.

    Train it to reconstruct its input: `compile(loss="binary_crossentropy")` and `fit(images, images)`, with values from
    0 to 1. The divergence from the standard normal distribution is sown into "losses". It is the mean over rows,
    divided by the number of values per image, to match a loss that is a mean over values. The sum of both is the
    negative evidence lower bound (ELBO) per value.

    Attributes:
      image_shape: height, width and channels of the images. Each entry of `features` halves height and width.
      latent_dim: number of latent values per image.
      features: number of channels of the encoder's convolutions; the decoder uses them in reverse order.
      hidden: width of the encoder's dense layer.
      beta: weight of the divergence (Higgins et al., "beta-VAE", 2017).
      output_activation: activation of the decoder's outputs; None returns logits.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.

    Raises:
      ValueError: if the images do not have shape `image_shape`, or if height or width is not divisible by
        `2 ** len(features)`.

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
        """Creates the encoder and the decoder."""
        scale = 2 ** len(self.features)
        if len(self.image_shape) != 3 or not self.features or any(side % scale for side in self.image_shape[:2]):
            raise ValueError(f"VAE with {len(self.features)} convolutions expects an `image_shape` (height, width, "
                             f"channels) whose sides are multiples of {scale}, and at least one convolution. Received: "
                             f"{tuple(self.image_shape)}. Pad the images, or give other `features`.")
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        self.encoder = _Encoder(self.latent_dim, self.features, self.hidden, **options)
        self.decoder = _Decoder(self.image_shape, self.features, **options)

    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        """Returns the reconstructions, in the shape of the images, and sows the divergence into "losses".

        Training draws the latent values from the "latent" RNG stream; otherwise the means are used.
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
        """Returns means and log-variances of the latent values, float32 of shape `(rows, latent_dim)`."""
        if x.shape[1:] != tuple(self.image_shape):
            raise ValueError(f"VAE expects images of shape (rows, {', '.join(map(str, self.image_shape))}). Received: "
                             f"shape {x.shape}. Give their shape as `image_shape`.")
        return self.encoder(x)

    def decode(self, latents: jax.Array) -> jax.Array:
        """Returns images, float32 of shape `(rows, *image_shape)`, from latent values of shape `(rows, latent_dim)`."""
        return classify(self.decoder(latents), self.output_activation)
