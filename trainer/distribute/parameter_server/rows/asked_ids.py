"""Row ids that a function looks up in its tables, read from its trace.

Owns the refusal of functions that use a table in another way, or look up ids that depend on a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import partial_eval

from trainer.core.compile.traces.equations import CALLS, REMATERIALISED, jaxpr_of, program_of, run, scan_counts
from trainer.distribute.parameter_server.rows.served_rows import refusal
from trainer.distribute.parameter_server.rows.take_rows import TAKE_ROWS

Rows = dict[str, tuple[Any, Any]]
"""Rows of tables by name, with their indices; see `take_rows`."""

_RUN_ONCE = (*CALLS, *REMATERIALISED, "core_call", "custom_jvp_call", "custom_vjp_call")
_CASTS = ("convert_element_type", "copy", "reduce_precision", "stop_gradient")


def asked_ids(function: Callable[..., Any], features: Mapping[str, Any], *args: Any) -> dict[str, list[jax.Array]]:
    """Returns the ids that `function(rows, *args)` looks up, by table; -1 means an id outside of the table.

    Args:
      function: a pure function of `Rows` and of other arguments.
      features: the shape and dtype of a row, for each table.
      *args: the other arguments, or tracers of them.

    Raises:
      ValueError: if the function uses a table other than by `take_rows`, if its ids depend on rows of a table, or if
        they cannot be known before it runs.
    """
    names = sorted(features)
    few: Rows = {name: (jnp.zeros((1, *features[name].shape), features[name].dtype), jnp.zeros(1, jnp.int32))
                 for name in names}
    closed = jax.make_jaxpr(function)(few, *args)
    flat = jax.tree.leaves((few, args))
    _check_uses(closed.jaxpr, dict(zip(closed.jaxpr.invars[:2 * len(names):2], names, strict=True)))

    asked: list[str] = []

    def find(*flat: Any) -> list[Any]:
        found = _run(closed, flat)[1]
        asked[:] = [name for name, _ in found]
        return [ids for _, ids in found]

    ids_alone = jax.make_jaxpr(find)(*flat)
    # Removes everything that the ids do not depend on, which is most of a step.
    jaxpr, is_used = partial_eval.dce_jaxpr(ids_alone.jaxpr, [True] * len(ids_alone.jaxpr.outvars))
    if any(is_used[:2 * len(names)]):
        raise refusal(names[is_used.index(True) // 2],
                      "used to compute what is looked up in a table: a step must know all ids before it gets rows")
    ids = jaxpr_as_fun(ClosedJaxpr(jaxpr, ids_alone.consts))(
        *(leaf for leaf, used in zip(flat, is_used, strict=True) if used))
    return {name: [leaf for other, leaf in zip(asked, ids, strict=True) if other == name] for name in names}


def _program_of(equation: JaxprEqn) -> Any | None:
    """Returns the program that an equation runs once on its own operands, or once per iteration of a scan."""
    return program_of(equation) if equation.primitive.name in (*_RUN_ONCE, "scan") else None


def _looks_up(jaxpr: Jaxpr) -> bool:
    return any(equation.primitive is TAKE_ROWS or _any_looks_up(equation) for equation in jaxpr.eqns)


def _any_looks_up(equation: JaxprEqn) -> bool:
    return any(_looks_up(jaxpr_of(inner)) for inner in jaxprs_in_params(equation.params))


def _check_uses(jaxpr: Jaxpr, tables: dict[Any, str]) -> list[str | None]:
    """Refuses uses of tables other than `take_rows`; returns the table names of the results, None for other results."""
    def name_of(variable: Any) -> str | None:
        return None if hasattr(variable, "val") else tables.get(variable)  # literals have a value, and no hash

    for equation in jaxpr.eqns:
        names = [name_of(variable) for variable in equation.invars]
        if equation.primitive is TAKE_ROWS:
            names = names[1:]
        if not any(names):
            continue
        operation, inner = equation.primitive.name, _program_of(equation)
        name = next(name for name in names if name)
        if operation in _CASTS:
            tables[equation.outvars[0]] = name
        elif inner is not None and (operation != "scan" or not any(names[scan_counts(equation)[0]:])):
            of_inner = {variable: name for variable, name in zip(jaxpr_of(inner).invars, names, strict=True) if name}
            results = _check_uses(jaxpr_of(inner), of_inner)
            tables |= {variable: name for variable, name in zip(equation.outvars, results, strict=True) if name}
        elif _any_looks_up(equation):
            raise refusal(name, f"looked up in a branch or a loop of unknown length ({operation}), where a step cannot "
                                "know its ids beforehand")
        else:
            raise refusal(name, f"used by a step otherwise than by calls of `nn.Embed`: in the operation {operation!r}")
    return list(map(name_of, jaxpr.outvars))


def _run(closed: Any, args: Sequence[Any]) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Returns the results of a program, and the ids that it looks up, with the names of the tables."""
    jaxpr = jaxpr_of(closed)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else values[variable]

    found: list[tuple[str, Any]] = []
    for equation in jaxpr.eqns:
        if equation.effects and not equation.outvars:
            continue  # such as `jax.debug.print`, which the step itself runs
        operands = list(map(read, equation.invars))
        inner = _program_of(equation)
        if equation.primitive is TAKE_ROWS:
            found.append((equation.params["name"], operands[2]))
        if inner is None or not _looks_up(jaxpr_of(inner)):
            results = run(equation, operands)
        else:
            results, more = (
                _run_scan(equation, operands) if equation.primitive.name == "scan" else _run(inner, operands))
            found += more
        values |= zip(equation.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars)), found


def _run_scan(equation: JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], list[tuple[str, Any]]]:
    names: list[str] = []
    consts, carried = scan_counts(equation)

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
        results, found = _run(program_of(equation), [*args[:consts], *carry, *xs])
        names[:] = [name for name, _ in found]
        return results[:carried], (results[carried:], [ids for _, ids in found])

    start = consts + carried
    carry, (ys, ids) = jax.lax.scan(turn, list(args[consts:start]), list(args[start:]), equation.params["length"],
                                    equation.params["reverse"])
    return [*carry, *ys], list(zip(names, ids, strict=True))
