"""Checks of the numbers that optimizers and schedules are built from: by keyword, so that errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.errors import describe


def as_number(argument: str, value: Any, expected: str = "a number") -> float:
    """Returns `value`, a Python number or an array with one element and no axes, as a float.

    Raises:
      TypeError: if it is anything else.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__") or np.shape(value) != ():
        raise TypeError(f"`{argument}` must be {expected}. Received: {describe(value)}.")
    return float(value)


def require_positive(**arguments: Any) -> None:
    """Raises unless every argument is a finite number above 0."""
    _require(arguments, "a number above 0", lambda number: 0 < number < math.inf)


def require_non_negative(**arguments: Any) -> None:
    """Raises unless every argument is a finite number of at least 0."""
    _require(arguments, "a number of at least 0", lambda number: 0 <= number < math.inf)


def require_decay_rate(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1): the share of an average that survives an update."""
    _require(arguments, "a number in [0, 1)", lambda number: 0 <= number < 1)


def require_momentum(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1]."""
    _require(arguments, "a number in [0, 1]", lambda number: 0 <= number <= 1)


def _require(arguments: dict[str, Any], expected: str, holds: Callable[[float], bool]) -> None:
    for argument, value in arguments.items():
        number = as_number(argument, value, expected)
        if not holds(number):
            raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={number:g}.")
