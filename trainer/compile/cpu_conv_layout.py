"""Convolutions in the layout that XLA computes fast on CPUs, also in loops.

Owns the rewriting of a traced program: XLA transposes the arrays of other convolutions too, but not in a loop. There it
computes them element by element, up to nine times as slowly, and a group of fused steps is a loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from trainer.compile.jit import compiled


def with_fast_convolutions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the same value, with convolutions of rows, positions, channels only.

    JAX computes the gradients of a convolution by others, in another layout. Their arrays are transposed before and
    after.

    Args:
      function: compiled; a pure function of trees of arrays. It is traced when the returned function is called.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> layer, x = nn.Conv(4, (3, 3)), jnp.ones((2, 8, 8, 1))
      >>> params = layer.init(jax.random.key(0), x)
      >>> gradient = jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))
      >>> jax.tree.map(jnp.shape, with_fast_convolutions(gradient)(params))
      {'params': {'bias': (4,), 'kernel': (3, 3, 1, 4)}}
    """

    def call(*args: Any) -> Any:
        program, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
        rewritten = _rewritten(program, {})
        if rewritten is program:
            return function(*args)
        return jax.tree.unflatten(jax.tree.structure(outputs), jaxpr_as_fun(rewritten)(*jax.tree.leaves(args)))

    return call


def _rewritten(program: Any, known: dict[int, Any]) -> Any:
    """Returns a `ClosedJaxpr` or `Jaxpr` with fast convolutions; the very program if it has no others.

    Args:
      program: which others may contain as well.
      known: the results so far, by the identity of the program.
    """
    if id(program) not in known:
        inner = getattr(program, "jaxpr", program)  # later versions of JAX have one class for both
        if inner is program:
            old, new = program.eqns, [_rewritten_equation(equation, known) for equation in program.eqns]
            is_same = all(map(operator.is_, old, new))
            known[id(program)] = program if is_same else program.replace(eqns=new)
        else:
            rewritten = _rewritten(inner, known)
            known[id(program)] = program if rewritten is inner else program.replace(jaxpr=rewritten)
    return known[id(program)]


def _rewritten_equation(equation: Any, known: dict[int, Any]) -> Any:
    if equation.primitive.name == "conv_general_dilated":
        is_fast = equation.params["dimension_numbers"] == _fast_layout(equation.outvars[0].aval.ndim)
        return equation if is_fast else _transposed(equation)
    params = {name: _rewritten_param(value, known) for name, value in equation.params.items()}
    is_same = all(map(operator.is_, params.values(), equation.params.values()))
    return equation if is_same else equation.replace(params=params)


def _rewritten_param(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return _rewritten(value, known)
    if isinstance(value, (tuple, list)):
        parts = [_rewritten_param(part, known) for part in value]
        if not all(map(operator.is_, parts, value)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _fast_layout(rank: int) -> jax.lax.ConvDimensionNumbers:
    rows_positions_channels = (0, rank - 1, *range(1, rank - 1))
    positions_channels = (rank - 1, rank - 2, *range(rank - 2))  # those of the output come last
    return jax.lax.ConvDimensionNumbers(rows_positions_channels, positions_channels, rows_positions_channels)


def _transposed(convolution: Any) -> Any:
    """Returns an equation that calls the convolution in the fast layout, of transposed arrays."""
    def call(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = convolution.params["dimension_numbers"]
        fast = _fast_layout(inputs.ndim)
        output = convolution.primitive.bind(
            _moved(inputs, numbers.lhs_spec, fast.lhs_spec), _moved(kernel, numbers.rhs_spec, fast.rhs_spec),
            **convolution.params | {"dimension_numbers": fast})
        return _moved(output, fast.out_spec, numbers.out_spec)

    shapes = (jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype) for operand in convolution.invars)
    equation, = jax.make_jaxpr(compiled(call))(*shapes).eqns
    return equation.replace(
        invars=convolution.invars, outvars=convolution.outvars, source_info=convolution.source_info)


def _moved(array: jax.Array, axes: Sequence[int], to: Sequence[int]) -> jax.Array:
    """Returns an array transposed, so that what was axis `axes[i]` is axis `to[i]`."""
    order = dict(zip(to, axes, strict=True))
    return jax.lax.transpose(array, [order[axis] for axis in range(array.ndim)])
