"""Convolutions in the layout that XLA computes fast on CPUs, also in loops.

Owns the rewrite of a traced program. XLA itself transposes the arrays of other layouts, but not in a loop, such as a
group of fused steps: there it computes element by element, up to nine times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from trainer.core.compile.traces.equations import called, rewritten


def with_fast_convolutions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an equal function whose convolutions all have the layout rows, positions, channels.

    The gradients of a convolution are convolutions in other layouts. Their arrays are transposed before and after.

    Args:
      function: a compiled, pure function of trees of arrays. It is traced when the returned function is called.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> layer, x = nn.Conv(4, (3, 3)), jnp.ones((2, 8, 8, 1))
      >>> params = layer.init(jax.random.key(0), x)
      >>> gradient = jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))
      >>> jax.tree.map(jnp.shape, with_fast_convolutions(gradient)(params))
      {'params': {'bias': (4,), 'kernel': (3, 3, 1, 4)}}
    """

    return rewritten(function, _fast)


def _fast(equation: Any, _: Sequence[Any]) -> Any:
    is_slow = equation.primitive.name == "conv_general_dilated" and (
        equation.params["dimension_numbers"] != _fast_layout(equation.outvars[0].aval.ndim))
    return _transposed(equation) if is_slow else equation


def _fast_layout(rank: int) -> jax.lax.ConvDimensionNumbers:
    rows_positions_channels = (0, rank - 1, *range(1, rank - 1))
    positions_channels = (rank - 1, rank - 2, *range(rank - 2))  # output channels come last
    return jax.lax.ConvDimensionNumbers(rows_positions_channels, positions_channels, rows_positions_channels)


def _transposed(convolution: JaxprEqn) -> Any:
    """Returns an equation that calls the convolution in the fast layout, on transposed arrays."""
    def call(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = convolution.params["dimension_numbers"]
        fast = _fast_layout(inputs.ndim)
        output = convolution.primitive.bind(
            _moved(inputs, numbers.lhs_spec, fast.lhs_spec), _moved(kernel, numbers.rhs_spec, fast.rhs_spec),
            **convolution.params | {"dimension_numbers": fast})
        return _moved(output, fast.out_spec, numbers.out_spec)

    return called(call, convolution)


def _moved(array: jax.Array, axes: Sequence[int], to: Sequence[int]) -> jax.Array:
    """Returns an array transposed, so that axis `axes[i]` becomes axis `to[i]`."""
    order = dict(zip(to, axes, strict=True))
    return jax.lax.transpose(array, [order[axis] for axis in range(array.ndim)])
