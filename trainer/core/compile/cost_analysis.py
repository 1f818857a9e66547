"""The floating-point operations of a program, counted in its trace.

XLA's own count differs by platform: GPUs count only compiled programs, described devices count nothing, and CPUs take
seconds and count only the first iteration of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

_LOOP = "scan"
_CALLS = ("jit", "shard_map", "checkpoint")  # their outputs are the outputs of an inner program
# Primitives that move or make numbers and compute nothing.
_MOVES = frozenset((
    "all_gather", "all_to_all", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type",
    "copy", "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "iota", "name",
    "optimization_barrier", "pad", "pcast", "ppermute", "pvary", "random_fold_in", "random_seed", "random_unwrap",
    "random_wrap", "reshape", "rev", "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose"))
# cuDNN's attention, and the number of its products: of queries and keys, and of weights and values; backwards the first
# again, and two for the gradient of each.
_ATTENTION = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
_PRODUCTS = ("dot_general", "conv_general_dilated", *_ATTENTION)


class Cost(NamedTuple):
    """The floating-point operations of a program.

    Attributes:
      flops: number of all floating-point operations.
      repeated_flops: operations of all iterations but the first of loops with known length.
      products: operations of products and convolutions by compute type: the dtype of the operands, or "tensorfloat32"
        for float32 in JAX's default precision, as GPUs compute it.
    """

    flops: float
    repeated_flops: float
    products: Mapping[str, float] = MappingProxyType({})

    def divided_by(self, devices: int) -> Cost:
        """Returns the share of each device if `devices` devices compute the program together."""
        return Cost(self.flops / devices, self.repeated_flops / devices,
                    {name: flops / devices for name, flops in self.products.items()})


def cost_of(program: ClosedJaxpr | Jaxpr) -> Cost:
    """Returns the cost of a traced program.

    Products and convolutions count two operations for each multiplication, moves of numbers count none, and all other
    operations count one for each output element. Loops of known length (`jax.lax.scan` and loops built on it) count
    once per iteration, other loops count a single iteration. Computations that no output depends on do not count: XLA
    removes them.

    Args:
      program: a traced program, such as `jax.jit(function).trace(...).jaxpr`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def power(matrix):
      ...     return jax.lax.scan(lambda product, _: (product @ matrix, None), matrix, length=10)[0]
      >>> cost = cost_of(jax.jit(power).trace(jnp.eye(4, dtype=jnp.bfloat16)).jaxpr)
      >>> cost.products, cost.repeated_flops == 9 * 2 * 4**3
      ({'bfloat16': 1280.0}, True)
    """
    return _cost_of_outputs(program, [True] * len(_plain(program).outvars))


def _cost_of_outputs(program: ClosedJaxpr | Jaxpr, are_used: Sequence[bool]) -> Cost:
    flops, repeated = 0.0, 0.0
    products: dict[str, float] = {}
    used = {output for output, is_used in zip(_plain(program).outvars, are_used, strict=True)
            if is_used and isinstance(output, Var)}
    for equation in reversed(_plain(program).eqns):
        are_used = [output in used for output in equation.outvars]
        if not any(are_used) and not equation.effects:
            continue
        used.update(variable for variable in equation.invars if isinstance(variable, Var))
        iterations = equation.params["length"] if equation.primitive.name == _LOOP else 1
        parts = [_cost_of_part(part, equation, are_used) for part in _inner(equation)] or [_cost_of_one(equation)]
        for part in parts:
            flops += iterations * part.flops
            repeated += (iterations - 1) * part.flops + part.repeated_flops
            for dtype, count in part.products.items():
                products[dtype] = products.get(dtype, 0.0) + iterations * count
    return Cost(flops, repeated, products)


def _cost_of_part(program: ClosedJaxpr | Jaxpr, equation: JaxprEqn, are_used: Sequence[bool]) -> Cost:
    """Returns the cost of an inner program of an equation, of which some outputs are used."""
    outputs = _plain(program).outvars
    returns_its_outputs = equation.primitive.name in _CALLS and len(outputs) == len(are_used)
    return _cost_of_outputs(program, are_used if returns_its_outputs else [True] * len(outputs))


def _cost_of_one(equation: JaxprEqn) -> Cost:
    flops = _operations(equation)
    return Cost(flops, 0.0, {_computed_in(equation): flops} if equation.primitive.name in _PRODUCTS else {})


def _computed_in(equation: Any) -> str:
    dtype = str(equation.invars[0].aval.dtype)
    precision = equation.params.get("precision")
    is_default = precision is None or "HIGHEST" not in str(precision)
    return "tensorfloat32" if dtype == "float32" and is_default else dtype


def flops_by_scope(program: ClosedJaxpr | Jaxpr, scope_of: Callable[[str], Any], outer: Any = None) -> dict[Any, float]:
    """Returns the floating-point operations of a traced program by named scope, counted as in `cost_of`.

    Args:
      program: a traced program, such as the result of `jax.make_jaxpr`.
      scope_of: returns the key of a scope from the names of all scopes around an operation, joined by "/"; None for the
        key of the enclosing operations.
      outer: key of the operations around the program.

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
        if not inner and (operations := _operations(equation)):
            parts = [{key: operations}]
        for part in parts:
            for name, flops in part.items():
                total[name] = total.get(name, 0.0) + iterations * flops
    return total


def _operations(equation: JaxprEqn) -> float:
    """Returns the number of operations of an equation without inner programs."""
    if equation.primitive.name in _MOVES:
        return 0.0
    if equation.primitive.name in _ATTENTION:
        return _operations_of_attention(equation)
    return _operations_per_output(equation) * sum(
        math.prod(getattr(output.aval, "shape", ())) for output in equation.outvars)


def _operations_per_output(equation: Any) -> float:
    left = equation.invars[0].aval.shape if equation.invars else ()
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * math.prod(left[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        taps = math.prod(kernel) / kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * taps / math.prod(equation.params["lhs_dilation"])  # dilation inserts zeros
    return 1.0


def _operations_of_attention(equation: Any) -> float:
    query, key = (each.aval.shape for each in equation.invars[:2])
    rows, *sizes, features = query
    is_heads_first = bool(equation.params["layout"])
    length, heads = reversed(sizes) if is_heads_first else sizes
    positions = key[2 if is_heads_first else 1]
    products = _ATTENTION[equation.primitive.name] * 2.0 * rows * heads * length * positions * features
    return products / 2 if "CAUSAL" in str(equation.params["mask_type"]) else products  # it skips the other half


def _inner(equation: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (ClosedJaxpr, Jaxpr)):
                yield part


def _plain(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program
