"""The first operations of a traced program that compute with its arguments.

Owns the rule which operations only move values, or store them in a wider dtype. A use is the name of a primitive, or
one of the three names below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.typing import DTypeLike

from trainer.core.compile.traces.equations import CALLS, REMATERIALISED, jaxpr_of, program_of, scan_counts
from trainer.core.types import PyTree

PRODUCT, NARROWING, RESULT = "product", "narrowing", "result"

_PRODUCTS = ("dot_general", "conv_general_dilated")
_MOVES = ("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "gather",
          "pad", "rev", "copy", "split", "sharding_constraint", "device_put", "reshard")  # of their first operand
_MOVES_OF_ALL = ("concatenate", "select_n", "optimization_barrier")
_CALLS = (*CALLS, *REMATERIALISED, "custom_jvp_call", "custom_vjp_call")


def first_uses(function: Callable[[PyTree], Any], inputs: PyTree, dtype: DTypeLike) -> Any:
    """Returns a tree like `inputs` with the set of the first uses of each leaf in a function.

    Args:
      function: a pure function of `inputs`.
      inputs: arrays, or shapes of arrays.
      dtype: conversions to this dtype are a `NARROWING`.

    >>> uses = first_uses(lambda x: jnp.sin(x["time"]) + x["image"].T @ jnp.ones(3),
    ...                   {"time": jnp.ones(2), "image": jnp.ones((3, 2))}, jnp.bfloat16)
    >>> uses["image"], uses["time"]
    ({'product'}, {'sin'})
    """
    program = jaxpr_of(jax.make_jaxpr(function)(inputs))
    uses = []
    for argument in program.invars:
        found, results = _uses(program, argument, jnp.dtype(dtype))
        uses.append(found | {RESULT} if results else found)
    return jax.tree.unflatten(jax.tree.structure(inputs), uses)


def _uses(program: Any, argument: Any, dtype: Any) -> tuple[set[str], list[int]]:
    """Returns the first uses of an argument, and the positions of results that are its values."""
    moved, found = {argument}, set()
    for equation in program.eqns:
        for position, operand in enumerate(equation.invars):
            if isinstance(operand, Literal) or operand not in moved:
                continue
            uses, results = _uses_in(equation, position, dtype)
            found |= uses
            moved |= {equation.outvars[index] for index in results}
    return found, [index for index, result in enumerate(program.outvars)
                   if not isinstance(result, Literal) and result in moved]


def _uses_in(equation: Any, position: int, dtype: Any) -> tuple[set[str], list[int]]:
    """Returns the first uses of an operand in an equation, and the positions of its results that are its values."""
    name, results = equation.primitive.name, list(range(len(equation.outvars)))
    if name in _PRODUCTS:
        return {PRODUCT}, []
    if name == "convert_element_type":
        old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
        if new == dtype:
            return {NARROWING}, []
        is_wider = jnp.issubdtype(new, jnp.floating) and new.itemsize >= old.itemsize
        return (set(), results) if is_wider else ({name}, [])
    if name in _MOVES and position == 0:
        return set(), results
    if name in _MOVES_OF_ALL and not (name == "select_n" and position == 0):
        return set(), [position] if name == "optimization_barrier" else results
    if name in _CALLS:
        inner = jaxpr_of(program_of(equation))
        if len(inner.invars) == len(equation.invars):
            return _uses(inner, inner.invars[position], dtype)
    if name == "scan":
        inner, (constants, carried) = jaxpr_of(program_of(equation)), scan_counts(equation)
        if not constants <= position < constants + carried:
            found, results = _uses(inner, inner.invars[position], dtype)
            if all(index >= carried for index in results):
                return found, results
    if name == "cond" and position > 0:
        found, results = set(), []
        for branch in map(jaxpr_of, equation.params["branches"]):
            uses, moved = _uses(branch, branch.invars[position - 1], dtype)
            found, results = found | uses, sorted({*results, *moved})
        return found, results
    return {name}, []
