"""Convolution, batch normalization and padding with Keras's names, defaults and initializers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.zoo_module import ZooModule

Activation = Callable[[jax.Array], jax.Array]
Padding = str | Sequence[tuple[int, int]]
_GLOROT = nn.initializers.glorot_uniform()


class ConvLayers(ZooModule, kw_only=True):
    """Base module of models and blocks, with methods that create layers of one dtype.

    All attributes are keyword-only, also in subclasses. The path of a layer, joined by underscores, is its name in
    Keras: "expand" in the block "block_1" is `block_1_expand`.

    Attributes:
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.
      norm_momentum: decay rate of BatchNorm's running averages.
      norm_epsilon: value that BatchNorm adds to the variance.

    Raises:
      ValueError: if an attribute of a subclass is invalid.
    """

    dtype: Any = None
    param_dtype: Any = jnp.float32
    norm_momentum: float = 0.99
    norm_epsilon: float = 1e-3

    def __init_subclass__(cls, kw_only: bool = True, **kwargs: Any):
        super().__init_subclass__(kw_only=kw_only, **kwargs)

    @property
    def layer_options(self) -> dict[str, Any]:
        """The attributes that a model passes on to its blocks."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype, "norm_momentum": self.norm_momentum,
                "norm_epsilon": self.norm_epsilon}

    def conv(
        self, x: jax.Array, features: int, kernel_size: int | Sequence[int], strides: int = 1, *, name: str,
        padding: Padding = "SAME", use_bias: bool = False, groups: int = 1,
        kernel_init: nn.initializers.Initializer = _GLOROT,
    ) -> jax.Array:
        """Returns a convolution of `x`, of shape `(rows, height, width, features)`.

        Args:
          x: array of shape `(rows, height, width, channels)`.
          features: number of output channels.
          kernel_size: height and width of the kernel, or one number for both.
          strides: stride in both directions.
          name: name of the layer.
          padding: "SAME" as in TensorFlow, "VALID", or the padding before and after height and width.
          use_bias: whether to add a bias.
          groups: number of channel groups that are convolved separately.
          kernel_init: kernel initializer.
        """
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        return nn.Conv(features, kernel, strides=(strides, strides), padding=padding, use_bias=use_bias,
                       feature_group_count=groups, kernel_init=kernel_init, dtype=self.dtype,
                       param_dtype=self.param_dtype, name=name)(x)

    def depthwise_conv(
        self, x: jax.Array, kernel_size: int, strides: int = 1, *, name: str, padding: Padding = "SAME",
        use_bias: bool = False, kernel_init: nn.initializers.Initializer = _GLOROT,
    ) -> jax.Array:
        """Returns a depthwise convolution of `x`, with the arguments of `conv`."""
        return self.conv(x, x.shape[-1], kernel_size, strides, name=name, padding=padding, use_bias=use_bias,
                         groups=x.shape[-1], kernel_init=kernel_init)

    def dense(
        self, x: jax.Array, features: int, *, name: str, kernel_init: nn.initializers.Initializer = _GLOROT
    ) -> jax.Array:
        """Returns the outputs of a dense layer with a bias."""
        return nn.Dense(features, kernel_init=kernel_init, dtype=self.dtype, param_dtype=self.param_dtype, name=name)(x)

    def layer_norm(self, x: jax.Array, *, name: str, epsilon: float = 1e-6) -> jax.Array:
        """Returns `x` normalized over the channels, scaled and shifted."""
        return nn.LayerNorm(epsilon=epsilon, use_fast_variance=False, dtype=self.dtype, param_dtype=self.param_dtype,
                            name=name)(x)

    def batch_norm(self, x: jax.Array, training: bool, *, name: str, use_scale: bool = True) -> jax.Array:
        """Returns `x` normalized by the batch statistics in training, and by the running averages otherwise."""
        # As in Keras: the fast variance, E[x^2] - E[x]^2, loses all precision in float32 where the mean is large.
        return nn.BatchNorm(use_running_average=not training, momentum=self.norm_momentum, epsilon=self.norm_epsilon,
                            use_scale=use_scale, use_fast_variance=False, dtype=self.dtype,
                            param_dtype=self.param_dtype, name=name)(x)


def stride_padding(shape: Sequence[int], kernel_size: int) -> Padding:
    """Returns the padding of Keras's strided convolutions: `ZeroPadding2D` before a "valid" convolution of stride 2.

    For even sides, the smaller half of the padding comes first.

    >>> stride_padding((1, 32, 33, 8), 3)
    [(0, 1), (1, 1)]
    """
    half = kernel_size // 2
    return [(half - 1 + side % 2, half) for side in shape[1:3]]


def max_pool(x: jax.Array, size: int, strides: int, padding: Padding = "VALID") -> jax.Array:
    """Returns the maxima of windows, padded with minus infinity. After a ReLU this equals Keras's zero padding."""
    return nn.max_pool(x, (size, size), strides=(strides, strides), padding=padding)


def relu6(x: jax.Array) -> jax.Array:
    """Returns `min(max(x, 0), 6)`."""
    return jnp.minimum(nn.relu(x), 6)


def round_channels(channels: float, divisor: int = 8) -> int:
    """Returns the multiple of `divisor` nearest to `channels`, at most 10 % below it, as in MobileNets.

    >>> round_channels(0.35 * 32), round_channels(0.75 * 16)
    (16, 16)
    """
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded
