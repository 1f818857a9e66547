"""Which results of a function are its arguments, as they were.

Owns how that is read from the function's trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def is_passed_through(function: Callable[[dict[Any, Any]], dict[Any, Any]], values: dict[Any, Any]) -> dict[Any, bool]:
    """Returns, for each key, whether `function(values)[key]` is `values[key]`, also by way of inner compiled functions.

    Args:
      function: takes and returns a dict of arrays by the same keys.
      values: what it is traced with.

    >>> is_passed_through(lambda x: {"a": jax.jit(lambda a: a)(x["a"]), "b": x["b"] + 1}, {"a": 1.0, "b": 1.0})
    {'a': True, 'b': False}
    """
    keys = list(values)
    jaxpr = jax.make_jaxpr(lambda leaves: [function(dict(zip(keys, leaves, strict=True)))[key] for key in keys])(
        [values[key] for key in keys]).jaxpr
    return {key: _origin(jaxpr, result) is argument
            for key, result, argument in zip(keys, jaxpr.outvars, jaxpr.invars, strict=True)}


def _origin(jaxpr: Any, result: Any) -> Any:
    """Returns the variable that `result` is a copy of."""
    for equation in reversed(jaxpr.eqns):
        position = next((index for index, out in enumerate(equation.outvars) if out is result), None)
        if position is None:
            continue
        inner = next((equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params), None)
        inner = getattr(inner, "jaxpr", inner)  # a closed one
        if inner is None or len(inner.invars) != len(equation.invars):
            return result
        origin = _origin(inner, inner.outvars[position])
        index = next((index for index, argument in enumerate(inner.invars) if argument is origin), None)
        if index is None:
            return result
        result = equation.invars[index]
    return result
