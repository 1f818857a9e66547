"""Equations of traced programs, read and run again: what differs from one version of JAX to the next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from trainer.compile.jit import compiled

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


# Returns the equation that takes an equation's place, or the very equation; the second argument is all of its program.
Replace = Callable[[Any, Sequence[Any]], Any]


def rewritten(function: Callable[..., Any], replace: Replace, skipped: Collection[str] = ()) -> Callable[..., Any]:
    """Returns a function with other equations in its trace, also in loops, branches and functions.

    Args:
      function: compiled; a pure function of trees of arrays. It is traced when the returned function is called, which
        calls it as it is where nothing is replaced.
      replace: see `Replace`.
      skipped: the names of primitives whose programs stay as they are.
    """

    def call(*args: Any) -> Any:
        program, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
        changed = _Rewriting(replace, skipped).program(program)
        if changed is program:
            return function(*args)
        return jax.tree.unflatten(jax.tree.structure(outputs), jaxpr_as_fun(changed)(*jax.tree.leaves(args)))

    return call


def called(function: Callable[..., Any], equation: Any) -> Any:
    """Returns an equation that calls a function of an equation's operands in its place."""
    shapes = (jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype) for operand in equation.invars)
    call, = jax.make_jaxpr(compiled(function))(*shapes).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)


class _Rewriting:
    def __init__(self, replace: Replace, skipped: Collection[str]):
        self._replace, self._skipped = replace, skipped
        self._known: dict[int, Any] = {}  # the results so far, by the identity of the program

    def program(self, program: Any) -> Any:
        """Returns a `ClosedJaxpr` or `Jaxpr`; the very program if nothing in it is replaced."""
        if id(program) not in self._known:
            inner = jaxpr_of(program)
            if inner is program:
                old, new = program.eqns, [self._equation(equation, program.eqns) for equation in program.eqns]
                is_same = all(map(operator.is_, old, new))
                self._known[id(program)] = program if is_same else program.replace(eqns=new)
            else:
                changed = self.program(inner)
                self._known[id(program)] = program if changed is inner else program.replace(jaxpr=changed)
        return self._known[id(program)]

    def _equation(self, equation: Any, program: Sequence[Any]) -> Any:
        replaced = self._replace(equation, program)
        if replaced is not equation or equation.primitive.name in self._skipped:
            return replaced
        params = {name: self._param(value) for name, value in equation.params.items()}
        is_same = all(map(operator.is_, params.values(), equation.params.values()))
        return equation if is_same else equation.replace(params=params)

    def _param(self, value: Any) -> Any:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return self.program(value)
        if isinstance(value, (tuple, list)):
            parts = [self._param(part) for part in value]
            if not all(map(operator.is_, parts, value)):
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value
