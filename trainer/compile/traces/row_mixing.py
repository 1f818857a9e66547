"""Whether a function of a batch computes each row's results from that row, and what is drawn for it, alone.

Owns how that is proved from the function's trace. The proof knows what each primitive does along the axis of the rows;
what it does not know counts as mixing rows. The function is traced on other numbers of rows too, so that what it
computes from their number is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from trainer.compile.traces.equations import jaxpr_of
from trainer.compile.traces.row_bits import can_draw_rows
from trainer.core.types import PyTree

# A prime that sizes other than the rows' hardly have as a factor, so that it tells the axis of the rows.
_ROWS = 1009
_OTHER_ROWS = 1013

_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "device_put", "digamma", "div", "eq", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow",
    "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg",
    "nextafter", "not", "or", "polygamma", "population_count", "pow", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "sharding_constraint", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "squeeze",
    "stop_gradient", "sub", "tan", "tanh", "transpose", "xor"))
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor",
               "argmax", "argmin")
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
_SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma")
_PROGRAMS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call",
             "custom_vjp_call", "custom_vjp_call_jaxpr", "scan", "while", "cond")
_OF_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")
# Whose derivatives of their own, of functions of rows, treat rows apart too.
_KNOWN = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (jax, flax, optax))


def why_rows_mix(
    function: Callable[..., Any], batch: PyTree, *others: PyTree, rows: Collection[int] = (_OTHER_ROWS,),
    known: dict[int, Any] | None = None,
) -> str | None:
    """Returns what in a function may compute a row's results from other rows, as a clause; None if it is proved not to.

    All results that depend on the batch have to have its rows. Nothing is computed.

    Args:
      function: a function of a batch, and of other arguments, that can be traced.
      batch: a tree of arrays or shapes, rows first; how many there are does not matter.
      *others: other arguments, such as weights: trees of arrays or shapes.
      rows: numbers of rows that it is to do the same with, as where it is called with some of a batch's rows.
      known: what is known of the same function, to which is added.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((4, 3))
      >>> why_rows_mix(lambda x: x - x.mean(1, keepdims=True), x)
      >>> why_rows_mix(lambda x: x - x.mean(0), x)
      'rows are combined (`reduce_sum`)'
      >>> why_rows_mix(lambda x: x if len(x) > 2 else -x, x, rows=(2, 4))
      'it computes with the number of rows'
    """
    known = {} if known is None else known
    try:
        if _ROWS not in known:
            program = jax.make_jaxpr(function)(_with_rows(batch, _ROWS), *others)
            known[_ROWS] = program, _why_mixed(program.jaxpr, set())
        program, reason = known[_ROWS]
        if reason is not None:
            return reason
        for count in rows:
            if count not in known:
                known[count] = _same(program, jax.make_jaxpr(function)(_with_rows(batch, count), *others), count)
    except Exception as error:  # it takes other numbers of rows only: a multiple of a group's, for example
        return f"it cannot be traced on any number of rows ({type(error).__name__})"
    return None if all(known[count] for count in rows) else "it computes with the number of rows"


def _with_rows(batch: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)


def _why_mixed(jaxpr: Any, seen: set[int]) -> str | None:
    if id(jaxpr) in seen:
        return None
    seen.add(id(jaxpr))
    if any(map(_row_axes, jaxpr.constvars)):
        return "there is a constant for each row"
    return next(filter(None, (_why_equation_mixes(equation, seen) for equation in jaxpr.eqns)), None)


def _why_equation_mixes(equation: Any, seen: set[int]) -> str | None:
    name = equation.primitive.name
    if name == "random_bits" and can_draw_rows(equation) and _row_axes(equation.outvars[0]) in ([], [0]):
        return None
    if name in _DRAWS:
        return "numbers are drawn at random"
    has_rows = any(map(_row_axes, (*equation.invars, *equation.outvars)))
    programs = list(_programs(list(equation.params.values())))
    if name in _PROGRAMS:
        if name.startswith("custom") and has_rows and not all(map(_is_known, programs)):
            return f"a derivative is the user's own (`{name}`)"
        if name == "scan" and equation.params["length"] % _ROWS == 0:
            return "there is a loop over the rows"
        return next(filter(None, (_why_mixed(program, seen) for program in programs)), None)
    if equation.effects:
        return f"there is a side effect (`{name}`)"
    if not has_rows:
        return f"the host is called (`{name}`)" if "callback" in name else None
    if programs or not _leaves_rows_apart(name, equation):
        return f"rows are combined (`{name}`)"
    return None


def _leaves_rows_apart(name: str, equation: Any) -> bool:
    """Returns whether each row's results, of a primitive that has rows, are computed from that row alone."""
    axes = [_row_axes(variable) for variable in equation.invars]
    if name == "optimization_barrier":
        return True
    if any(len(found) > 1 for found in axes) or any(len(_row_axes(result)) != 1 for result in equation.outvars):
        return False  # rows were paired, or reduced
    params = equation.params
    if not any(axes):  # rows are made
        return name in ("broadcast_in_dim", "broadcast") or (
            name == "iota" and params["dimension"] not in _row_axes(equation.outvars[0]))
    if name in _ELEMENTWISE:
        return True
    operand = equation.invars[0]
    of_first = axes[0][0] if axes[0] else None
    result = _row_axes(equation.outvars[0])[0]
    if name == "dot_general":
        return True  # a contraction of rows would have left none
    if name == "gather":
        return of_first is None or of_first in params["dimension_numbers"].operand_batching_dims or (
            params["slice_sizes"][of_first] == operand.aval.shape[of_first] and not axes[1])
    if of_first is None:
        return False
    size = operand.aval.shape[of_first]
    if name == "reshape":  # rows stay the slowest index within their axis
        return bool(np.prod(operand.aval.shape[:of_first]) == np.prod(equation.outvars[0].aval.shape[:result]))
    if name in ("slice", "dynamic_slice"):
        return result == of_first and equation.outvars[0].aval.shape[result] == size
    if name == "dynamic_update_slice":
        return axes[1] == axes[0] and equation.invars[1].aval.shape[of_first] == size
    if name == "pad":
        return params["padding_config"][of_first] == (0, 0, 0)
    if name in ("concatenate", "rev", "sort", "split", *_CUMULATIVE, *_REDUCTIONS):
        along = params.get("dimensions", params.get("axes", (params.get("axis", params.get("dimension")),)))
        return of_first not in along and all(found in ([], axes[0]) for found in axes)
    if name in ("top_k", "approx_top_k"):
        return of_first != operand.aval.ndim - 1
    if name in _WINDOWS:
        return (params["window_dimensions"][of_first] == params["window_strides"][of_first] == 1
                and tuple(params["padding"][of_first]) == (0, 0))
    if name == "conv_general_dilated":
        return (of_first == params["dimension_numbers"].lhs_spec[0] and not axes[1]
                and params["batch_group_count"] == 1)
    if name in _SCATTERS:
        numbers = params["dimension_numbers"]
        if of_first in numbers.operand_batching_dims:
            return True
        return not axes[1] and of_first not in (
            *numbers.inserted_window_dims, *numbers.scatter_dims_to_operand_dims) and (
            bool(axes[2]) and equation.invars[2].aval.shape[axes[2][0]] == size)
    if name in ("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"):
        return all(not found or found[0] < variable.aval.ndim - 2
                   for found, variable in zip(axes, equation.invars, strict=True))
    if name == "fft":
        return of_first < operand.aval.ndim - len(params["fft_lengths"])
    return False


def _row_axes(variable: Any) -> list[int]:
    shape = getattr(variable.aval, "shape", ())
    return [axis for axis, size in enumerate(shape) if size and size % _ROWS == 0]


def _is_known(program: Any) -> bool:
    """Returns whether the function that a program was traced from is one of the libraries'."""
    _, _, source = str(program.debug_info.func_src_info).partition(" at ")
    return source.startswith(_KNOWN)


def _programs(values: Any) -> Iterator[Any]:
    """Yields the programs inside of an equation, such as the body of a loop."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _programs(value)
        elif hasattr(jaxpr_of(value), "eqns"):
            yield jaxpr_of(value)


def _same(one: Any, other: Any, rows: int) -> bool:
    """Returns whether two traces are equal but for the number of rows in shapes, which is `rows` in the other."""
    if one is other:
        return True
    if len(getattr(one, "consts", ())) != len(getattr(other, "consts", ())) or not all(
            map(_same_values, getattr(one, "consts", ()), getattr(other, "consts", ()))):
        return False
    one, other = (_computing(jaxpr_of(program), rows) for program in (one, other))
    return len(one) == len(other) and all(_same_equations(*pair, rows) for pair in zip(one, other, strict=True))


def _computing(program: Any, rows: int) -> list[Any]:
    """Returns equations to compare; a single row is broadcast and reshaped in other ways than several are."""
    return [equation for equation in program.eqns if rows > 1 or equation.primitive.name not in _OF_SHAPES]


def _same_equations(one: Any, other: Any, rows: int) -> bool:
    if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
        return False
    literals = zip(one.invars, other.invars, strict=True)
    if not all(isinstance(b, Literal) and _same_values(a.val, b.val) for a, b in literals if isinstance(a, Literal)):
        return False
    return all(_same_params(value, other.params.get(name), rows) for name, value in one.params.items())


def _same_params(one: Any, other: Any, rows: int, in_shape: bool = False) -> bool:
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(
            _same_params(a, b, rows, True) for a, b in zip(one, other, strict=True))
    if hasattr(jaxpr_of(one), "eqns"):
        return _same(one, other, rows)
    if in_shape and isinstance(one, int) and one and one % _ROWS == 0:
        return isinstance(other, int) and one // _ROWS * rows == other
    if isinstance(one, float):
        return isinstance(other, float) and _same_values(one, other)
    return not isinstance(one, (bool, int, str)) or one == other


def _same_values(one: Any, other: Any) -> bool:
    if one is other or jnp.issubdtype(getattr(one, "dtype", np.float32), jax.dtypes.extended):
        return True
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    one, other = np.asarray(one), np.asarray(other)
    return np.array_equal(one, other, equal_nan=np.issubdtype(one.dtype, np.inexact))
