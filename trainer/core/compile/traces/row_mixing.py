"""Proves that a function of a batch computes each row's results only from that row and its random draws.

Owns the proof from the function's trace. It knows how each primitive acts along the row axis; unknown primitives count
as mixing rows. Traces on other numbers of rows show computations with the number of rows.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import flax
import jax
import numpy as np
import optax
from jax.extend.core import Jaxpr, JaxprEqn

from trainer.core.compile.traces.equations import jaxpr_of
from trainer.core.compile.traces.row_bits import can_draw_rows
from trainer.core.compile.traces.same_traces import are_same_but_for_rows
from trainer.core.types import PyTree

# A prime that is hardly a factor of other sizes, so it marks the row axis.
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
# Packages whose custom derivatives of functions of rows keep rows apart too.
_KNOWN = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (jax, flax, optax))
# A custom backward pass may be any function of the cotangents, so the mean over replicas may differ from the result for
# the batch. The backward passes in these files are linear: cuDNN's attention, and the logits of a last layer.
_LINEAR_BACKWARD = (str(pathlib.Path(str(jax.__file__)).parent / "_src/cudnn/fused_attention_stablehlo.py"),
                    str(pathlib.Path(__file__).parents[3] / "losses/linear_logits.py"))


class RowsMix(Exception):
    """A function reports while it is traced that its rows mix. The message is the reason, a clause."""



def why_rows_mix(
    function: Callable[..., Any], batch: PyTree, *others: PyTree, rows: Collection[int] = (_OTHER_ROWS,),
    known: dict[int, Any] | None = None,
) -> str | None:
    """Returns the reason, as a clause, why a row's results may depend on other rows; None if they provably do not.

    All results that depend on the batch must have its rows. Nothing is computed.

    Args:
      function: a traceable function of a batch and of other arguments.
      batch: a tree of arrays or shapes, rows first. The number of rows does not matter.
      *others: other arguments, such as weights: trees of arrays or shapes.
      rows: numbers of rows for which the function must compute the same, for calls with some of a batch's rows.
      known: results so far for the same function; updated.

    Example:
      >>> x = np.ones((4, 3), np.float32)
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
                other = jax.make_jaxpr(function)(_with_rows(batch, count), *others)
                known[count] = are_same_but_for_rows(program, other, _ROWS, count)
    except RowsMix as error:
        return str(error)
    except Exception as error:  # it requires other numbers of rows, such as multiples of a group
        return f"it cannot be traced on any number of rows ({type(error).__name__})"
    return None if all(known[count] for count in rows) else "it computes with the number of rows"


def certain_mixing(function: Callable[..., Any], batch: PyTree, *others: PyTree) -> str | None:
    """Returns the operation that certainly computes a row's results from other rows, as a clause.

    Returns None if no such operation is known, or the function cannot be traced on any number of rows.

    Args:
      function: as in `why_rows_mix`.
      batch: as in `why_rows_mix`.
      *others: as in `why_rows_mix`.

    Example:
      >>> certain_mixing(lambda x: jax.random.normal(jax.random.key(0), x.shape), np.ones((4, 3), np.float32))
      'random numbers of all rows are drawn by one key (`random_bits`)'
    """
    try:
        program = jax.make_jaxpr(function)(_with_rows(batch, _ROWS), *others)
    except Exception:
        return None
    return _certainly_mixed(program.jaxpr)


def _certainly_mixed(jaxpr: Jaxpr) -> str | None:
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, equation.invars
        if name in _DRAWS and any(map(_row_axes, equation.outvars)) and not _row_axes(operands[0]):
            return f"random numbers of all rows are drawn by one key (`{name}`)"
        if name in (*_REDUCTIONS, *_CUMULATIVE, "sort") and set(_row_axes(operands[0])) & set(_axes_along(equation)):
            return f"rows are combined (`{name}`)"
        programs = _programs(list(equation.params.values())) if name in _PROGRAMS else ()
        if (found := next(filter(None, map(_certainly_mixed, programs)), None)) is not None:
            return found
    return None


def _axes_along(equation: JaxprEqn) -> Sequence[int]:
    """Returns the axes of a reduction or of another primitive that works along axes."""
    params = equation.params
    return params.get("dimensions", params.get("axes", (params.get("axis", params.get("dimension")),)))


def _with_rows(batch: PyTree, rows: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)


def _why_mixed(jaxpr: Jaxpr, seen: set[int]) -> str | None:
    if id(jaxpr) in seen:
        return None
    seen.add(id(jaxpr))
    if any(map(_row_axes, jaxpr.constvars)):
        return "there is a constant for each row"
    return next(filter(None, (_why_equation_mixes(equation, seen) for equation in jaxpr.eqns)), None)


def _why_equation_mixes(equation: JaxprEqn, seen: set[int]) -> str | None:
    name = equation.primitive.name
    if name == "random_bits" and can_draw_rows(equation) and _row_axes(equation.outvars[0]) in ([], [0]):
        return None
    if name in _DRAWS:
        return "numbers are drawn at random"
    has_rows = any(map(_row_axes, (*equation.invars, *equation.outvars)))
    programs = list(_programs(list(equation.params.values())))
    if name in _PROGRAMS:
        if name.startswith("custom_jvp") and has_rows and not all(
                _source(function).startswith(_KNOWN) for function in (*programs, equation.params.get("jvp_jaxpr_fun"))):
            return f"a derivative is the user's own (`{name}`)"
        if name.startswith("custom_vjp") and not _source(equation.params.get("bwd")).startswith(_LINEAR_BACKWARD):
            return f"a backward pass may be no sum over rows (`{name}`)"
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
    """Returns whether a primitive with rows computes each row's results only from that row."""
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
        return True  # a contraction of rows would leave no rows
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
        return of_first not in _axes_along(equation) and all(found in ([], axes[0]) for found in axes)
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


def _source(function: object) -> str:
    """Returns the source file of a function, or of a program's function; "" if unknown."""
    debug_info = getattr(function, "debug_info", None)
    return str(getattr(debug_info, "func_src_info", "")).partition(" at ")[2]


def _programs(values: Any) -> Iterator[Any]:
    """Yields the programs inside of an equation, such as the body of a loop."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _programs(value)
        elif hasattr(jaxpr_of(value), "eqns"):
            yield jaxpr_of(value)
