"""Equations of traced programs: access and evaluation across JAX versions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from trainer.core.compile.jit import compiled
from trainer.core.types import PyTree

CALLS = ("jit", "pjit", "closed_call")
_HIGH_LEVEL = "call_hi_primitive"  # of JAX 0.12
REMATERIALISED = ("checkpoint", "remat2", "remat")


def program_of(equation: JaxprEqn) -> Any:
    """Returns the program of a call or of a loop, a `ClosedJaxpr` or an object with its attributes."""
    found = equation.params["jaxpr"] if "jaxpr" in equation.params else equation.params["call_jaxpr"]
    return found if hasattr(found, "consts") else ClosedJaxpr(found, ())


def jaxpr_of(program: ClosedJaxpr | Jaxpr) -> Any:
    """Returns the `Jaxpr` of a program; later versions of JAX have a single class for both."""
    return getattr(program, "jaxpr", program)


def scan_counts(equation: Any) -> tuple[int, int]:
    """Returns the numbers of constant and carried arguments of a `scan`. A slice has an axis less than its argument."""
    turn = jaxpr_of(program_of(equation))
    unsliced, carried = (
        sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(outside, inside, strict=True))
        for outside, inside in ((equation.invars, turn.invars), (equation.outvars, turn.outvars)))
    return unsliced - carried, carried


def run(equation: JaxprEqn, values: Sequence[Any], **changes: Any) -> list[Any]:
    """Returns the results of an equation's operation for other operands.

    Args:
      equation: an equation of a traced program.
      values: the operands.
      **changes: parameters to change.
    """
    params = equation.primitive.get_bind_params({**equation.params, **changes})
    functions, params = params if isinstance(params, tuple) else ((), params)  # depends on the version of JAX
    with equation.ctx.manager:
        found = equation.primitive.bind(*functions, *values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


Change = Callable[[Any, Sequence[Any]], Any]
"""Returns the replacement of an equation, or the same equation; its second argument is all equations of the program."""


def rewritten(function: Callable[..., Any], change: Change, skipped: Collection[str] = ()) -> Callable[..., Any]:
    """Returns a function with changed equations in its trace, which is made at each call.

    Args:
      function: a compiled, pure function of trees of arrays. It is called directly if no equation changes.
      change, skipped: as in `with_equations`.
    """

    def call(*args: Any) -> Any:
        program, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
        changed = with_equations(program, change, {}, skipped)
        if changed is program:
            return function(*args)
        return evaluated(changed, args, outputs)

    return call


def evaluated(program: ClosedJaxpr, args: PyTree, outputs: PyTree) -> Any:
    """Returns the results of a program for a tree of arguments, as a tree with the structure of `outputs`."""
    return jax.tree.unflatten(jax.tree.structure(outputs), jaxpr_as_fun(program)(*jax.tree.leaves(args)))


def with_equations(
    program: ClosedJaxpr | Jaxpr, change: Change, known: dict[int, Any] | None = None, skipped: Collection[str] = ()
) -> Any:
    """Returns a program with changed equations, also in its loops, branches and calls; the same object if none changes.

    Args:
      program: a `ClosedJaxpr` or `Jaxpr`.
      change: called in the order of the program, for inner equations before the outer equation.
      known: results so far, by the identity of the program, for a `change` that does not depend on the place: a program
        that several equations call stays a single program. None rewrites it for each of them.
      skipped: names of primitives whose programs stay as they are.
    """
    if known is not None and id(program) in known:
        return known[id(program)]
    if (inner := jaxpr_of(program)) is not program:
        new = with_equations(inner, change, known, skipped)
        result = program if new is inner else program.replace(jaxpr=new)
    else:
        def param(value: Any) -> Any:
            if isinstance(value, (ClosedJaxpr, Jaxpr)):
                return with_equations(value, change, known, skipped)
            if isinstance(value, (tuple, list)):
                parts = [param(part) for part in value]
                if not all(map(operator.is_, parts, value)):
                    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            return value

        equations = [change(equation if equation.primitive.name in skipped else _with_params(equation, param),
                            program.eqns) for equation in program.eqns]
        is_same = all(map(operator.is_, equations, program.eqns))
        result = program if is_same else program.replace(eqns=equations)
    if known is not None:
        known[id(program)] = result
    return result


def _with_params(equation: JaxprEqn, param: Callable[[Any], Any]) -> Any:
    if equation.primitive.name == _HIGH_LEVEL:
        opened = _opened(equation)
        changed = _with_params(opened, param)
        return equation if changed is opened else changed
    params = {name: param(value) for name, value in equation.params.items()}
    is_same = all(map(operator.is_, params.values(), equation.params.values()))
    return equation if is_same else equation.replace(params=params)


def _opened(equation: JaxprEqn) -> Any:
    """Returns a call of the operations that an equation of JAX's high level, such as `jnp.nonzero`, stands for."""
    primitive = equation.params["_prim"]

    def operations(*operands: jax.Array) -> Any:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    return called(operations, equation)


def called(function: Callable[..., Any], equation: Any) -> Any:
    """Returns an equation that replaces an equation by a call of a function of its operands."""
    shapes = (jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype) for operand in equation.invars)
    call, = jax.make_jaxpr(compiled(function))(*shapes).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
