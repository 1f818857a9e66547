"""Compares two traces of a function on different numbers of rows.

Operations, operands, results, and shapes without the rows must be equal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from trainer.core.compile.traces.equations import jaxpr_of

# Primitives that broadcast and reshape a single row in other ways than several rows.
_OF_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")
_PLAIN = (bool, int, str, bytes, type(None), np.dtype)


def are_same_but_for_rows(one: ClosedJaxpr | Jaxpr, other: ClosedJaxpr | Jaxpr, rows: int, other_rows: int) -> bool:
    """Returns whether two traces are equal except for the number of rows in shapes.

    Args:
      one: a closed jaxpr.
      other: another closed jaxpr.
      rows: number of rows of `one`, which does not divide any other size.
      other_rows: number of rows of `other`.

    Example:
      >>> traces = [jax.make_jaxpr(lambda x: x[:, 0] * 2)(np.ones((rows, 3), np.float32)) for rows in (1009, 4)]
      >>> are_same_but_for_rows(*traces, 1009, 4)
      True
    """
    return _Comparison(rows, other_rows).are_same(one, other)


class _Comparison:
    def __init__(self, rows: int, other_rows: int):
        self._rows, self._other_rows = rows, other_rows

    def are_same(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        constants = getattr(one, "consts", ()), getattr(other, "consts", ())
        if len(constants[0]) != len(constants[1]) or not all(map(_are_same_values, *constants)):
            return False
        one, other = jaxpr_of(one), jaxpr_of(other)
        if (len(one.constvars), len(one.invars)) != (len(other.constvars), len(other.invars)):
            return False
        counterparts = dict(zip((*one.constvars, *one.invars), (*other.constvars, *other.invars), strict=True))
        if not all(map(self._are_same_arrays, counterparts.keys(), counterparts.values())):
            return False
        sources = _Sources(one, self._other_rows == 1), _Sources(other, self._other_rows == 1)
        equations = [each.computing for each in sources]
        if len(equations[0]) != len(equations[1]):
            return False
        for equation, counterpart in zip(*equations, strict=True):
            if not self._are_same_equations(equation, counterpart, counterparts, *sources):
                return False
            counterparts.update(zip(equation.outvars, counterpart.outvars, strict=True))
        return len(one.outvars) == len(other.outvars) and all(
            self._are_same_arrays(*pair) and _are_same_operands(*pair, counterparts, *sources)
            for pair in zip(one.outvars, other.outvars, strict=True))

    def _are_same_equations(self, one: JaxprEqn, other: JaxprEqn, counterparts: dict[Any, Any],
                            *sources: _Sources) -> bool:
        return (one.primitive is other.primitive and len(one.invars) == len(other.invars)
                and len(one.outvars) == len(other.outvars)
                and all(_are_same_operands(*pair, counterparts, *sources)
                        for pair in zip(one.invars, other.invars, strict=True))
                and all(map(self._are_same_arrays, one.outvars, other.outvars))
                and all(self._are_same_params(value, other.params.get(name)) for name, value in one.params.items()))

    def _are_same_arrays(self, one: Any, other: Any) -> bool:
        shapes = getattr(one.aval, "shape", ()), getattr(other.aval, "shape", ())
        return (getattr(one.aval, "dtype", None) == getattr(other.aval, "dtype", None)
                and len(shapes[0]) == len(shapes[1]) and all(map(self._are_same_sizes, *shapes)))

    def _are_same_sizes(self, one: int, other: int) -> bool:
        return one == other if not one or one % self._rows else one // self._rows * self._other_rows == other

    def _are_same_params(self, one: Any, other: Any, in_shape: bool = False) -> bool:
        if isinstance(one, (list, tuple)):
            return isinstance(other, (list, tuple)) and len(one) == len(other) and all(
                self._are_same_params(a, b, True) for a, b in zip(one, other, strict=True))
        if hasattr(jaxpr_of(one), "eqns"):
            return self.are_same(one, other)
        if in_shape and type(one) is int:
            return type(other) is int and self._are_same_sizes(one, other)
        if isinstance(one, float):
            return isinstance(other, float) and _are_same_values(one, other)
        return not isinstance(one, _PLAIN) or one == other


class _Sources:
    """The computing equations of a jaxpr; if `looks_through_shapes`, without plain reshapes and broadcasts."""

    def __init__(self, jaxpr: Jaxpr, looks_through_shapes: bool):
        self._reshaped = {id(equation.outvars[0]): equation.invars[0] for equation in jaxpr.eqns
                          if looks_through_shapes and equation.primitive.name in _OF_SHAPES}
        self.computing = [equation for equation in jaxpr.eqns if not (
            equation.outvars and id(equation.outvars[0]) in self._reshaped)]

    def of(self, variable: Any) -> Any:
        """Returns the variable or literal that a variable is a reshaped or broadcast form of."""
        while id(variable) in self._reshaped:
            variable = self._reshaped[id(variable)]
        return variable


def _are_same_operands(
    one: Any, other: Any, counterparts: dict[Any, Any], sources: _Sources, other_sources: _Sources
) -> bool:
    one, other = sources.of(one), other_sources.of(other)
    if isinstance(one, Literal) or isinstance(other, Literal):
        return isinstance(one, Literal) and isinstance(other, Literal) and _are_same_values(one.val, other.val)
    return counterparts.get(one) is other


def _are_same_values(one: object, other: object) -> bool:
    if one is other or jnp.issubdtype(getattr(one, "dtype", np.float32), jax.dtypes.extended):
        return True
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    one, other = np.asarray(one), np.asarray(other)
    return np.array_equal(one, other, equal_nan=np.issubdtype(one.dtype, np.inexact))
