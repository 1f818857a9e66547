"""The floating-point operations of a program, with what XLA's count leaves out: all but the first iteration of a loop.

Owns the arithmetic of a traced program's loops of known length, such as those of recurrent layers, of layers that are
scanned over, and of microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

_LOOP = "scan"
# What moves or makes numbers and computes nothing.
_MOVES = frozenset((
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "device_put",
    "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "iota", "name", "optimization_barrier", "pad",
    "random_fold_in", "random_seed", "random_unwrap", "random_wrap", "reshape", "rev", "sharding_constraint", "slice",
    "split", "squeeze", "stop_gradient", "transpose"))
_PRODUCTS = ("dot_general", "conv_general_dilated")


class Cost(NamedTuple):
    """The floating-point operations of a program.

    Attributes:
      flops: of all kinds.
      repeated_flops: of all iterations of loops of known length after the first.
      products: of products and convolutions, by what they are computed in: the dtype of the operands, or
        "tensorfloat32" for float32 in JAX's default precision, which GPUs compute so.
    """

    flops: float
    repeated_flops: float
    products: Mapping[str, float] = MappingProxyType({})


def cost_of(traced: Any) -> Cost:
    """Returns the cost of a `jax.stages.Traced`: XLA's count, or what is counted here for devices without one.

    For GPUs, and all devices that are plugins of JAX, XLA counts only what it has compiled.
    """
    flops = (traced.lower().cost_analysis() or {}).get("flops")
    if flops is None:
        return cost_of_trace(traced.jaxpr)
    repeated = repeated_flops(traced.jaxpr)
    return Cost(flops + repeated, repeated, products_of(traced.jaxpr))


def peak_bytes(compiled: Any) -> int:
    """Returns what an execution of a compiled program takes of a device's memory: arguments, results and temporary."""
    stats = compiled.memory_analysis()
    return int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
               - stats.alias_size_in_bytes)


def cost_of_trace(program: ClosedJaxpr | Jaxpr) -> Cost:
    """Returns the cost of a traced program as it is counted here; see `repeated_flops`."""
    return Cost(_flops(program, all_iterations=True), repeated_flops(program), products_of(program))


def products_of(program: ClosedJaxpr | Jaxpr) -> dict[str, float]:
    """Returns the floating-point operations of products and convolutions; see `Cost.products`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> products_of(jax.jit(lambda x: x @ x.astype(jnp.bfloat16).T).trace(jnp.ones((4, 8), jnp.bfloat16)).jaxpr)
      {'bfloat16': 256.0}
    """
    total: dict[str, float] = {}
    for equation in _plain(program).eqns:
        iterations = equation.params["length"] if equation.primitive.name == _LOOP else 1
        for part in _inner(equation):
            for dtype, flops in products_of(part).items():
                total[dtype] = total.get(dtype, 0.0) + iterations * flops
        if equation.primitive.name in _PRODUCTS:
            dtype, output = _computed_in(equation), getattr(equation.outvars[0].aval, "shape", ())
            total[dtype] = total.get(dtype, 0.0) + _operations_per_output(equation) * math.prod(output)
    return total


def _computed_in(equation: Any) -> str:
    dtype = str(equation.invars[0].aval.dtype)
    precision = equation.params.get("precision")
    is_default = precision is None or "HIGHEST" not in str(precision)
    return "tensorfloat32" if dtype == "float32" and is_default else dtype


def repeated_flops(program: ClosedJaxpr | Jaxpr) -> float:
    """Returns the floating-point operations of all iterations of a program's loops after the first.

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
    return _flops(program, all_iterations=True) - _flops(program, all_iterations=False)


def flops_by_scope(program: ClosedJaxpr | Jaxpr, scope_of: Callable[[str], Any], outer: Any = None) -> dict[Any, float]:
    """Returns the floating-point operations of a traced program by the named scope that they are in.

    They are counted as in `repeated_flops`, without operations that only move numbers.

    Args:
      program: traced, such as by `jax.make_jaxpr`.
      scope_of: returns the key of a scope from the names of all scopes around an operation, joined by "/"; None where
        that of the operations around it counts.
      outer: the key of the operations around the program.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def square(x):
      ...     with jax.named_scope("product"):
      ...         return x @ x
      >>> flops_by_scope(jax.make_jaxpr(square)(jnp.ones((4, 4))), lambda names: names or None)
      {'product': 128.0}
    """
    total: dict[Any, float] = {}
    for equation in _plain(program).eqns:
        found = scope_of(str(equation.source_info.name_stack))
        key, inner = outer if found is None else found, list(_inner(equation))
        iterations = equation.params["length"] if equation.primitive.name == _LOOP else 1
        parts = [flops_by_scope(part, scope_of, key) for part in inner]
        if not inner and equation.primitive.name not in _MOVES:
            parts = [{key: _operations_per_output(equation) * sum(
                math.prod(getattr(output.aval, "shape", ())) for output in equation.outvars)}]
        for part in parts:
            for name, flops in part.items():
                total[name] = total.get(name, 0.0) + iterations * flops
    return total


def _flops(program: ClosedJaxpr | Jaxpr, all_iterations: bool) -> float:
    """Returns the operations of a program, with all iterations of each loop or with a single iteration."""
    total = 0.0
    for equation in _plain(program).eqns:
        inner = list(_inner(equation))
        iterations = equation.params["length"] if all_iterations and equation.primitive.name == _LOOP else 1
        total += iterations * sum(_flops(part, all_iterations) for part in inner) if inner else (
            _operations_per_output(equation) * sum(
                math.prod(getattr(output.aval, "shape", ())) for output in equation.outvars))
    return total


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
