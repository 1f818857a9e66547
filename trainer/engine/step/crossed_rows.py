"""Labels `(rows,)` beside outputs `(rows, 1)` in a step: NumPy's rules make `(rows, rows)` of them, and nothing fails.

Owns the analysis of the trace. Code that compares all rows with all on purpose rarely takes labels for a row and
outputs for a column.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from trainer.core.compile.traces.equations import CALLS, REMATERIALISED, jaxpr_of, program_of

_CALLS = (*CALLS, *REMATERIALISED, "custom_jvp_call", "custom_vjp_call")
_LABELS, _ROW = "labels of shape (n,)", "labels as a row (1, n)"
_OF_LABELS = "anything else that depends on labels alone"
_COLUMN = "other values as a column (n, 1)"


def crosses_rows(program: ClosedJaxpr, labels: list[bool]) -> bool:
    """Returns whether an operation takes labels for a row and other values for a column.

    Args:
      program: the traced step or loss.
      labels: which of its arguments are labels of shape `(rows,)`.

    >>> import jax, jax.numpy as jnp
    >>> y, outputs = jnp.ones(4), jnp.ones((4, 1))
    >>> crosses_rows(jax.make_jaxpr(lambda y, outputs: (y - outputs) ** 2)(y, outputs), [True, False])
    True
    >>> crosses_rows(jax.make_jaxpr(lambda y, outputs: (y - outputs[:, 0]) ** 2)(y, outputs), [True, False])
    False
    """
    inner = jaxpr_of(program)
    return _walk(inner, [_LABELS if is_label else None for is_label in labels])[0]


def _walk(program: ClosedJaxpr | Jaxpr, kinds: list[str | None]) -> tuple[bool, list[str | None]]:
    """Returns whether a program crosses rows, and the kinds of its results."""
    known = dict(zip(program.invars, kinds, strict=True))

    def kind_of(variable: Any) -> str | None:
        return None if hasattr(variable, "val") else known.get(variable)  # a literal is not hashable

    for equation in program.eqns:
        operands = list(map(kind_of, equation.invars))
        if equation.primitive.name in _CALLS:
            inner = jaxpr_of(program_of(equation))
            if len(inner.invars) == len(operands):
                crosses, results = _walk(inner, operands)
                if crosses:
                    return True, []
                known.update(zip(equation.outvars, results, strict=True))
        elif _ROW in operands and any(
                kind == _COLUMN or (kind is None and _is_column(variable))
                for kind, variable in zip(operands, equation.invars, strict=True)):
            return True, []
        else:
            known[equation.outvars[0]] = _kind(equation, operands)
    return False, list(map(kind_of, program.outvars))


def _kind(equation: Any, operands: list[str | None]) -> str | None:
    name = equation.primitive.name
    shape: tuple[int, ...] = getattr(equation.outvars[0].aval, "shape", ())
    arrays = [(kind, variable) for kind, variable in zip(operands, equation.invars, strict=True)
              if getattr(variable.aval, "shape", ())]
    kinds = {kind for kind, _ in arrays}
    is_spread = name in ("broadcast_in_dim", "reshape") and len(shape) == 2 and shape[1] > 1
    if kinds and kinds <= {_LABELS, _ROW, _OF_LABELS}:
        if is_spread and kinds <= {_LABELS, _ROW}:
            return _ROW
        keeps_shape = len(kinds) == 1 and all(variable.aval.shape == shape for _, variable in arrays)
        return kinds.pop() if keeps_shape else _OF_LABELS
    if is_spread and kinds <= {None, _COLUMN} and any(_is_column(variable) for _, variable in arrays):
        return _COLUMN
    return None


def _is_column(variable: Any) -> bool:
    shape: tuple[int, ...] = getattr(variable.aval, "shape", ())
    return len(shape) == 2 and shape[1] == 1 and shape[0] > 1
