"""Outputs of a traced function that lie in [0, 1] for all arguments, such as the outputs of a softmax or a sigmoid.

Owns the analysis of the trace. It is conservative: other outputs may lie in [0, 1] too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from trainer.core.compile.traces.equations import CALLS, REMATERIALISED, jaxpr_of, program_of

_CALLS = (*CALLS, *REMATERIALISED, "custom_jvp_call", "custom_vjp_call")
_CASTS = ("convert_element_type", "stop_gradient", "copy", "reduce_precision", "optimization_barrier")
_MOVES = ("reshape", "broadcast_in_dim", "transpose", "squeeze", "slice", "rev", "expand_dims", "dynamic_slice",
          "gather", "reduce_max", "reduce_min")
_OF_SEVERAL = ("mul", "max", "min", "concatenate")  # these map numbers in [0, 1] to numbers in [0, 1]

_PROBABILITIES = object()
_ONES = object()  # probabilities that are 1 for all arguments


@dataclasses.dataclass(frozen=True)
class _Powers:
    """An array of exponentials, which are positive."""

    source: Any


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums of exponentials over some axes; `axes` maps each other axis of the exponentials to its current axis."""

    source: Any
    axes: dict[int, int] = dataclasses.field(hash=False)


def are_probabilities(jaxpr: ClosedJaxpr) -> list[bool]:
    """Returns which results of a program provably lie in [0, 1].

    Args:
      jaxpr: the program, a `ClosedJaxpr`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> are_probabilities(jax.make_jaxpr(lambda x: (jax.nn.softmax(x), jax.nn.sigmoid(x), 2 * x))(jnp.ones((2, 3))))
    [True, True, False]
    """
    return [kind in (_PROBABILITIES, _ONES) for kind in _kinds_of_results(jaxpr)]


def are_ones(jaxpr: ClosedJaxpr) -> list[bool]:
    """Returns which results of a program are 1 for all arguments, because they are a softmax over a single number.

    Args:
      jaxpr: the program.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> are_ones(jax.make_jaxpr(lambda x: (jax.nn.softmax(x), jax.nn.softmax(x, axis=0)))(jnp.ones((2, 1))))
    [True, False]
    """
    return [kind is _ONES for kind in _kinds_of_results(jaxpr)]


def _kinds_of_results(jaxpr: ClosedJaxpr) -> list[Any]:
    program = jaxpr_of(jaxpr)
    return _kinds(program, [None] * len(program.invars))


def _kinds(program: ClosedJaxpr | Jaxpr, arguments: list[Any]) -> list[Any]:
    """Returns the known properties of each result of a program, from the known properties of its arguments."""
    known = dict(zip(program.invars, arguments, strict=True))

    def of(variable: Any) -> Any:
        return None if hasattr(variable, "val") else known.get(variable)  # a literal is not hashable

    for equation in program.eqns:
        operands = list(map(of, equation.invars))
        if equation.primitive.name in _CALLS:
            inner = jaxpr_of(program_of(equation))
            kinds = _kinds(inner, operands) if len(inner.invars) == len(operands) else []
        else:
            kinds = [_kind(equation, operands)]
        known.update(zip(equation.outvars, kinds))  # noqa: B905
    return list(map(of, program.outvars))


def _kind(equation: Any, operands: list[Any]) -> Any:
    name, first = equation.primitive.name, operands[0] if operands else None
    if name == "logistic":
        return _PROBABILITIES
    if name == "exp":
        return _Powers(equation.outvars[0])
    if name in _CASTS and len(operands) == 1:
        return first
    if name == "reduce_sum" and isinstance(first, _Powers):
        kept = [axis for axis in range(equation.invars[0].aval.ndim) if axis not in equation.params["axes"]]
        return _Sums(first.source, {axis: place for place, axis in enumerate(kept)})
    if name == "broadcast_in_dim" and isinstance(first, _Sums):
        places = equation.params["broadcast_dimensions"]
        return _Sums(first.source, {axis: places[place] for axis, place in first.axes.items()})
    if name == "div":
        is_share = (isinstance(first, _Powers) and isinstance(operands[1], _Sums)
                    and first.source is operands[1].source
                    and all(axis == place for axis, place in operands[1].axes.items()))
        if not is_share:
            return None
        shape = equation.invars[0].aval.shape
        is_alone = all(size == 1 for axis, size in enumerate(shape) if axis not in operands[1].axes)
        return _ONES if is_alone else _PROBABILITIES
    if first in (_PROBABILITIES, _ONES):
        if name in _MOVES:
            return first
        if name in _OF_SEVERAL and all(kind in (_PROBABILITIES, _ONES) for kind in operands):
            return _PROBABILITIES
    return None
