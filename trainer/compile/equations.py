"""Equations of traced programs, read and run again: what differs from one version of JAX to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

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
