"""Which results of a function depend on some of its arguments.

Owns how that is read from the function's trace. What loops and branches compute counts as depending on all that they
are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from trainer.core.types import PyTree


def dependent_results(function: Callable[..., dict[str, Any]], argument: PyTree, *others: PyTree) -> set[str]:
    """Returns the keys of `function(argument, *others)` whose values depend on the values of `argument`.

    Its shapes are no values. Nothing is computed.

    Args:
      function: returns a dict of arrays.
      argument: a tree of arrays or shapes.
      *others: further arguments, likewise.

    >>> import jax.numpy as jnp
    >>> sorted(dependent_results(lambda x, n: {"steps": n + 1, "sum": n + x.sum()}, jnp.ones(3), 2.0))
    ['sum']
    """
    keys: list[str] = []

    def values(argument: PyTree, *others: PyTree) -> list[Any]:
        results = function(argument, *others)
        keys[:] = results
        return list(results.values())

    jaxpr = jax.make_jaxpr(values)(argument, *others).jaxpr
    count = len(jax.tree.leaves(argument))
    depends = _outputs_depend(jaxpr, [index < count for index in range(len(jaxpr.invars))])
    return {key for key, value in zip(keys, depends, strict=True) if value}


def _outputs_depend(jaxpr: Any, inputs_depend: Sequence[bool]) -> list[bool]:
    found = {variable for variable, depends in zip(jaxpr.invars, inputs_depend, strict=True) if depends}

    def depends(variable: Any) -> bool:
        return not hasattr(variable, "val") and variable in found  # literals have a value, and no hash

    for equation in jaxpr.eqns:
        inputs = list(map(depends, equation.invars))
        if any(inputs):
            inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit", "remat2", "checkpoint") \
                else None
            inner = getattr(inner, "jaxpr", inner)
            outputs = [True] * len(equation.outvars) if inner is None else _outputs_depend(inner, inputs)
            found |= {variable for variable, value in zip(equation.outvars, outputs, strict=True) if value}
    return list(map(depends, jaxpr.outvars))
