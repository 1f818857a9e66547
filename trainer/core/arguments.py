"""Checks of the arguments that losses, metrics and optimizers are built from: by keyword, so that errors name them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.core.errors import describe, wrong_type


def as_number(argument: str, value: Any, expected: str = "a number") -> float:
    """Returns `value`, a Python number or an array with one element and no axes, as a float.

    Raises:
      TypeError: if it is anything else.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__") or np.shape(value) != ():
        raise TypeError(f"`{argument}` must be {expected}. Received: {describe(value)}.")
    return float(value)


def require(arguments: dict[str, Any], expected: str, holds: Callable[[float], bool]) -> None:
    """Raises unless every argument is a number for which `holds` is true.

    Args:
      arguments: what was given, by the names of the arguments.
      expected: what the error asks for.
      holds: the condition.

    Raises:
      TypeError: if one is not a number.
      ValueError: if the condition does not hold for one.
    """
    for argument, value in arguments.items():
        number = as_number(argument, value, expected)
        if not holds(number):
            raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={number:g}.")


def require_positive(**arguments: Any) -> None:
    """Raises unless every argument is a finite number above 0."""
    require(arguments, "a number above 0", lambda number: 0 < number < math.inf)


def require_share(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1]."""
    require(arguments, "a number in [0, 1]", lambda number: 0 <= number <= 1)


def require_count(**arguments: Any) -> None:
    """Raises unless every argument is a whole number of at least 1."""
    for argument, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise wrong_type(argument, value, "a whole number of at least 1")
        if value < 1:
            raise ValueError(f"`{argument}` must be a whole number of at least 1. Received: {argument}={value}.")


def require_bool(**arguments: Any) -> None:
    """Raises TypeError unless every argument is True or False."""
    for argument, value in arguments.items():
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_type(argument, value, "True or False")


def require_non_negative(**arguments: Any) -> None:
    """Raises unless every argument is a finite number of at least 0."""
    require(arguments, "a number of at least 0", lambda number: 0 <= number < math.inf)


def require_decay_rate(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1): the share of an average that survives an update."""
    require(arguments, "a number in [0, 1)", lambda number: 0 <= number < 1)
