"""What XLA's count of floating-point operations leaves out, and how much of it is slow in a loop.

Owns the arithmetic of a traced program's operations: of loops of known length, such as those of recurrent layers, of
layers that are scanned over, and of microbatches, all turns but the first; and of convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

_LOOP = "scan"  # of known length
_LOOPS = (_LOOP, "while")


class Cost(NamedTuple):
    """The floating-point operations of a program.

    Attributes:
      flops: of all kinds.
      repeated_flops: of all turns of loops of known length after the first ones.
      transposed_convolution_flops: of convolutions that are slow in a loop on CPU.
    """

    flops: float
    repeated_flops: float
    transposed_convolution_flops: float


def cost_of(traced: Any) -> Cost | None:
    """Returns the cost of a `jax.stages.Traced`; None if XLA does not know it."""
    flops = (traced.lower().cost_analysis() or {}).get("flops")
    if flops is None:
        return None
    repeated = repeated_flops(traced.jaxpr)
    return Cost(flops + repeated, repeated, transposed_convolution_flops(traced.jaxpr))


def repeated_flops(program: ClosedJaxpr | Jaxpr) -> float:
    """Returns the floating-point operations of all turns of a program's loops after the first ones.

    Of each loop whose length is known (`jax.lax.scan`, and what is built on it): products and convolutions count two
    for each multiplication, all else one for each element that it yields.

    Args:
      program: traced, such as `jax.jit(function).trace(...).jaxpr`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def power(matrix):
      ...     return jax.lax.scan(lambda product, _: (product @ matrix, None), matrix, length=10)[0]
      >>> repeated_flops(jax.jit(power).trace(jnp.eye(4)).jaxpr) == 9 * 2 * 4**3
      True
    """
    return _flops(program, all_turns=True) - _flops(program, all_turns=False)


def transposed_convolution_flops(program: ClosedJaxpr | Jaxpr) -> float:
    """Returns the floating-point operations of convolutions, outside of loops, that XLA for CPUs has to transpose.

    They are those whose inputs and outputs are not laid out as rows, positions, channels, and whose kernels not as
    positions, channels of the input, channels of the output. The gradients of a convolution are such ones. XLA for CPUs
    transposes outside of loops only, and computes them element by element in a loop, at about 3 GFLOP/s.

    Args:
      program: traced, as in `repeated_flops`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> layer, x = nn.Conv(4, (3, 3)), jnp.ones((2, 8, 8, 1))
      >>> params = layer.init(jax.random.key(0), x)
      >>> transposed_convolution_flops(jax.jit(layer.apply).trace(params, x).jaxpr)
      0.0
      >>> gradient = jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))
      >>> transposed_convolution_flops(gradient.trace(params).jaxpr) == 2 * (2 * 8 * 8) * (3 * 3 * 4)
      True
    """
    total = 0.0
    for equation in _plain(program).eqns:
        if equation.primitive.name == "conv_general_dilated" and _is_transposed(equation):
            total += _flops_outside_of_loops(equation)
        elif equation.primitive.name not in _LOOPS:
            total += sum(transposed_convolution_flops(part) for part in _inner(equation))
    return total


def _is_transposed(convolution: Any) -> bool:
    numbers = convolution.params["dimension_numbers"]
    positions = range(1, len(numbers.lhs_spec) - 1)
    rows_first = (0, len(positions) + 1, *positions)  # the axes of rows and channels, then those of the positions
    channels_last = (len(positions) + 1, len(positions), *range(len(positions)))
    return numbers != (rows_first, channels_last, rows_first)


def _flops(program: ClosedJaxpr | Jaxpr, all_turns: bool) -> float:
    """Returns the operations of a program, with all turns of each loop or with one."""
    total = 0.0
    for equation in _plain(program).eqns:
        inner = list(_inner(equation))
        turns = equation.params["length"] if all_turns and equation.primitive.name == _LOOP else 1
        total += turns * sum(_flops(part, all_turns) for part in inner) if inner else _flops_outside_of_loops(equation)
    return total


def _flops_outside_of_loops(equation: Any) -> float:
    outputs = sum(math.prod(getattr(output.aval, "shape", ())) for output in equation.outvars)
    return _operations_per_output(equation) * outputs


def _operations_per_output(equation: Any) -> float:
    left = equation.invars[0].aval.shape if equation.invars else ()
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * math.prod(left[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2.0 * math.prod(kernel) / kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 1.0


def _inner(equation: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (ClosedJaxpr, Jaxpr)):
                yield part


def _plain(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program
