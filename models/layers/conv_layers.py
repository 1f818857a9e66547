"""Convolution, batch normalization and padding with the names, defaults and initializers of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from trainer.models.layers.checks import check

Activation = Callable[[jax.Array], jax.Array]
Padding = str | Sequence[tuple[int, int]]
_GLOROT = nn.initializers.glorot_uniform()


class ConvLayers(nn.Module, kw_only=True):
    """A module whose methods make layers of one dtype: the base of whole models and of their blocks.

    Attributes are keyword-only, those of subclasses too.

    A layer's path, joined by underscores, is its name in Keras: "expand" in the block "block_1" is `block_1_expand`
    there.

    Attributes:
      dtype: what the layers compute in; that of inputs and parameters by default.
      param_dtype: the dtype of the parameters.
      norm_momentum: what is kept of BatchNorm's running averages in a step.
      norm_epsilon: what BatchNorm adds to the variance.

    Raises:
      ValueError: an attribute of a subclass that `check` knows cannot work.
    """

    dtype: Any = None
    param_dtype: Any = jnp.float32
    norm_momentum: float = 0.99
    norm_epsilon: float = 1e-3

    def __init_subclass__(cls, kw_only: bool = True, **kwargs: Any):
        super().__init_subclass__(kw_only=kw_only, **kwargs)

    def __post_init__(self) -> None:
        check(self)
        super().__post_init__()

    @property
    def layer_options(self) -> dict[str, Any]:
        """The attributes that a block has in common with the model around it."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype, "norm_momentum": self.norm_momentum,
                "norm_epsilon": self.norm_epsilon}

    def conv(
        self, x: jax.Array, features: int, kernel_size: int | Sequence[int], strides: int = 1, *, name: str,
        padding: Padding = "SAME", use_bias: bool = False, groups: int = 1,
        kernel_init: nn.initializers.Initializer = _GLOROT,
    ) -> jax.Array:
        """Returns a convolution of `x`, of shape `(rows, height, width, features)`.

        Args:
          x: shape `(rows, height, width, channels)`.
          features: how many channels come out.
          kernel_size: height and width of the kernel, or one number for both.
          strides: how far the kernel moves, in both directions.
          name: the layer's.
          padding: "SAME" as TensorFlow's, "VALID", or what is added before and after height and width.
          use_bias: whether a bias is added.
          groups: how many groups of channels are convolved separately.
          kernel_init: of the kernel.
        """
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        return nn.Conv(features, kernel, strides=(strides, strides), padding=padding, use_bias=use_bias,
                       feature_group_count=groups, kernel_init=kernel_init, dtype=self.dtype,
                       param_dtype=self.param_dtype, name=name)(x)

    def depthwise_conv(
        self, x: jax.Array, kernel_size: int, strides: int = 1, *, name: str, padding: Padding = "SAME",
        use_bias: bool = False, kernel_init: nn.initializers.Initializer = _GLOROT,
    ) -> jax.Array:
        """Returns a convolution of each channel of `x` on its own; see `conv`."""
        return self.conv(x, x.shape[-1], kernel_size, strides, name=name, padding=padding, use_bias=use_bias,
                         groups=x.shape[-1], kernel_init=kernel_init)

    def dense(
        self, x: jax.Array, features: int, *, name: str, kernel_init: nn.initializers.Initializer = _GLOROT
    ) -> jax.Array:
        """Returns a dense layer's outputs, with a bias."""
        return nn.Dense(features, kernel_init=kernel_init, dtype=self.dtype, param_dtype=self.param_dtype, name=name)(x)

    def layer_norm(self, x: jax.Array, *, name: str, epsilon: float = 1e-6) -> jax.Array:
        """Returns `x` normalized over the channels, then scaled and shifted."""
        return nn.LayerNorm(epsilon=epsilon, use_fast_variance=False, dtype=self.dtype, param_dtype=self.param_dtype,
                            name=name)(x)

    def batch_norm(self, x: jax.Array, training: bool, *, name: str, use_scale: bool = True) -> jax.Array:
        """Returns `x` normalized over the batch in training, and by the running averages otherwise."""
        # Flax's default, E[x^2] - E[x]^2, cancels in float32 where a mean is large: Keras's is the other one.
        return nn.BatchNorm(use_running_average=not training, momentum=self.norm_momentum, epsilon=self.norm_epsilon,
                            use_scale=use_scale, use_fast_variance=False, dtype=self.dtype,
                            param_dtype=self.param_dtype, name=name)(x)


def stride_padding(shape: Sequence[int], kernel_size: int) -> Padding:
    """Returns the padding with which Keras convolves in strides of 2, by `ZeroPadding2D` before a "valid" convolution.

    It puts the smaller half of the padding before an even side, and so is not "SAME", which adds less in all.

    >>> stride_padding((1, 32, 33, 8), 3)
    [(0, 1), (1, 1)]
    """
    half = kernel_size // 2
    return [(half - 1 + side % 2, half) for side in shape[1:3]]


def max_pool(x: jax.Array, size: int, strides: int, padding: Padding = "VALID") -> jax.Array:
    """Returns the maxima of windows, where padding counts as minus infinity: as Keras pads by zeros after a ReLU."""
    return nn.max_pool(x, (size, size), strides=(strides, strides), padding=padding)


def relu6(x: jax.Array) -> jax.Array:
    """Returns `min(max(x, 0), 6)`."""
    return jnp.minimum(nn.relu(x), 6)


def round_channels(channels: float, divisor: int = 8) -> int:
    """Returns the multiple of `divisor` next to `channels`, at most 10 % below it: how MobileNets scale their widths.

    >>> round_channels(0.35 * 32), round_channels(0.75 * 16)
    (16, 16)
    """
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded
