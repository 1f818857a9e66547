"""Whether a function of a batch may compute a row's outputs from other rows.

Owns how that is read from the function's trace. It errs to one side: what it finds may still leave each row alone, such
as a sort along the rows that is undone, so a finding is a reason to compare numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from trainer.core.types import PyTree

# A prime that sizes other than the rows' hardly have as a factor, so that they tell the axis of the rows.
_ROWS = 1009

_ALONG_AN_AXIS = ("sort", "rev", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def may_mix_rows(function: Callable[..., Any], batch: PyTree, *others: PyTree) -> bool:
    """Returns whether some row's results may depend on other rows. Nothing is computed.

    Args:
      function: a function of a batch, and of other arguments, that can be traced.
      batch: a tree of arrays or shapes, rows first; how many there are does not matter.
      *others: other arguments, such as weights: trees of arrays or shapes.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((4, 3))
    >>> may_mix_rows(lambda x: x - x.mean(1, keepdims=True), x), may_mix_rows(lambda x: x - x.mean(0), x)
    (False, True)
    """
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((_ROWS, *leaf.shape[1:]), leaf.dtype), batch)
    try:
        return _mixes(jax.make_jaxpr(function)(rows, *others).jaxpr)
    except Exception:  # it takes other numbers of rows only: a multiple of a group's, for example
        return True


def _mixes(jaxpr: Any) -> bool:
    return any(map(_equation_mixes, jaxpr.eqns))


def _equation_mixes(equation: Any) -> bool:
    if not any(_row_axes(variable) for variable in equation.invars):
        return False
    inner = list(_jaxprs(list(equation.params.values())))
    if inner:
        return equation.params.get("length") == _ROWS or any(map(_mixes, inner))  # a scan over rows has a carry
    if any(len(_row_axes(result)) != 1 for result in equation.outvars):
        return True  # rows were reduced, or paired
    name, operand = equation.primitive.name, equation.invars[0]
    if name in _ALONG_AN_AXIS:
        axes = equation.params.get("dimensions", (equation.params.get("axis", equation.params.get("dimension")),))
        return any(axis in _row_axes(operand) for axis in axes)
    if name == "gather":
        batching = equation.params["dimension_numbers"].operand_batching_dims
        return any(equation.params["slice_sizes"][axis] < operand.aval.shape[axis]
                   for axis in _row_axes(operand) if axis not in batching)
    return name == "concatenate" and equation.params["dimension"] in _row_axes(operand)


def _row_axes(variable: Any) -> list[int]:
    shape = getattr(variable.aval, "shape", ())
    return [axis for axis, size in enumerate(shape) if size and size % _ROWS == 0]


def _jaxprs(values: Any) -> Iterator[Any]:
    """Yields the programs inside of an equation, such as the body of a loop."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _jaxprs(value)
        elif hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield getattr(value, "jaxpr", value)
