"""Equations of traced programs, read and run again: what differs from one version of JAX to the next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

CALLS = ("jit", "pjit", "closed_call")
REMATERIALISED = ("checkpoint", "remat2", "remat")


def program_of(equation: Any) -> Any:
    """Returns the program of a call or of a loop, a `ClosedJaxpr` or what has its attributes."""
    found = equation.params["jaxpr"] if "jaxpr" in equation.params else equation.params["call_jaxpr"]
    return found if hasattr(found, "consts") else ClosedJaxpr(found, ())


def jaxpr_of(program: Any) -> Any:
    """Returns the `Jaxpr` of a program; later versions of JAX have one class for both."""
    return getattr(program, "jaxpr", program)


def scan_counts(equation: Any) -> tuple[int, int]:
    """Returns how many arguments of a `scan` are constant, and how many are carried: a slice has an axis less."""
    turn = jaxpr_of(program_of(equation))
    unsliced, carried = (
        sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(outside, inside, strict=True))
        for outside, inside in ((equation.invars, turn.invars), (equation.outvars, turn.outvars)))
    return unsliced - carried, carried


def run(equation: Any, values: Sequence[Any], **changes: Any) -> list[Any]:
    """Returns what an equation's operation gives for some values.

    Args:
      equation: of a traced program.
      values: in the place of its operands.
      **changes: parameters in the place of its own.
    """
    params = equation.primitive.get_bind_params({**equation.params, **changes})
    functions, params = params if isinstance(params, tuple) else ((), params)  # as some versions of JAX have it
    with equation.ctx.manager:
        found = equation.primitive.bind(*functions, *values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def rewritten(program: Any, change: Callable[[Any], Any], known: dict[int, Any] | None = None) -> Any:
    """Returns a program with `change(equation)` in place of each equation; the very program if none is another.

    Args:
      program: a `ClosedJaxpr` or `Jaxpr`. Those inside of its equations are rewritten as well.
      change: returns an equation of the same variables. It is called in the order of the program.
      known: the results so far, by the identity of the program, for a `change` that does not depend on the place: what
        several equations call stays one program. None rewrites it for each of them.
    """
    if known is not None and id(program) in known:
        return known[id(program)]
    if (inner := jaxpr_of(program)) is not program:
        new = rewritten(inner, change, known)
        result = program if new is inner else program.replace(jaxpr=new)
    else:
        equations = [change(_with_inner(equation, change, known)) for equation in program.eqns]
        is_same = all(map(operator.is_, equations, program.eqns))
        result = program if is_same else program.replace(eqns=equations)
    if known is not None:
        known[id(program)] = result
    return result


def _with_inner(equation: Any, change: Callable[[Any], Any], known: dict[int, Any] | None) -> Any:
    params = {name: _rewritten_param(value, change, known) for name, value in equation.params.items()}
    is_same = all(map(operator.is_, params.values(), equation.params.values()))
    return equation if is_same else equation.replace(params=params)


def _rewritten_param(value: Any, change: Callable[[Any], Any], known: dict[int, Any] | None) -> Any:
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return rewritten(value, change, known)
    if isinstance(value, (tuple, list)):
        parts = [_rewritten_param(part, change, known) for part in value]
        if not all(map(operator.is_, parts, value)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
