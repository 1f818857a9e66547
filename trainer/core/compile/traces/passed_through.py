"""Finds the results of a function that are unchanged arguments, from its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

_COPIES = ("device_put", "sharding_constraint")  # primitives that return their arguments, maybe on other devices


def is_passed_through(function: Callable[[dict[Any, Any]], dict[Any, Any]], values: dict[Any, Any]) -> dict[Any, bool]:
    """Returns, for each key, whether `function(values)[key]` is `values[key]`, also through inner compiled functions.

    Args:
      function: a function from a dict of arrays to a dict with the same keys.
      values: arguments for the trace.

    >>> is_passed_through(lambda x: {"a": jax.jit(lambda a: a)(x["a"]), "b": x["b"] + 1}, {"a": 1.0, "b": 1.0})
    {'a': True, 'b': False}
    """
    keys = list(values)
    jaxpr = jax.make_jaxpr(lambda leaves: [function(dict(zip(keys, leaves, strict=True)))[key] for key in keys])(
        [values[key] for key in keys])
    return dict(zip(keys, first_passed_through(jaxpr, len(keys)), strict=True))


def first_passed_through(jaxpr: ClosedJaxpr, count: int) -> list[bool]:
    """Returns, for each of the first results of a traced function, whether it is the argument in the same place.

    Args:
      jaxpr: a `ClosedJaxpr`.
      count: number of results, and of first arguments.
    """
    results, arguments = jaxpr.jaxpr.outvars[:count], jaxpr.jaxpr.invars[:count]
    return [_origin(jaxpr.jaxpr, result) is argument for result, argument in zip(results, arguments, strict=True)]


def _origin(jaxpr: Jaxpr, result: object) -> Any:
    """Returns the variable that `result` is a copy of."""
    for equation in reversed(jaxpr.eqns):
        position = next((index for index, out in enumerate(equation.outvars) if out is result), None)
        if position is None:
            continue
        if equation.primitive.name in _COPIES:
            result = equation.invars[position]
            continue
        inner = next((equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params), None)
        inner = getattr(inner, "jaxpr", inner)  # a closed jaxpr
        if inner is None or len(inner.invars) != len(equation.invars):
            return result
        origin = _origin(inner, inner.outvars[position])
        index = next((index for index, argument in enumerate(inner.invars) if argument is origin), None)
        if index is None:
            return result
        result = equation.invars[index]
    return result
