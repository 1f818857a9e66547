"""Keras's separable convolution: one layer with two kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


class SeparableConv(nn.Module):
    """Depthwise convolution with padding "SAME", followed by a pointwise convolution.

    Attributes:
      features: number of output channels.
      kernel_size: height and width of the depthwise kernel.
      dtype: dtype of the computation; inferred from inputs and parameters by default.
      param_dtype: dtype of the parameters.
    """

    features: int
    kernel_size: int
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of shape `(rows, height, width, features)`, for any number of input channels."""
        channels, glorot = x.shape[-1], nn.initializers.glorot_uniform()
        depthwise = self.param("depthwise_kernel", glorot, (self.kernel_size, self.kernel_size, 1, channels),
                               self.param_dtype)
        pointwise = self.param("pointwise_kernel", glorot, (1, 1, channels, self.features), self.param_dtype)
        x, depthwise, pointwise = nn.dtypes.promote_dtype(x, depthwise, pointwise, dtype=self.dtype)
        x = lax.conv_general_dilated(x, depthwise, (1, 1), "SAME", dimension_numbers=_DIMENSIONS,
                                     feature_group_count=channels)
        return lax.conv_general_dilated(x, pointwise, (1, 1), "SAME", dimension_numbers=_DIMENSIONS)
