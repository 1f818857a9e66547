"""What arguments of several callbacks are checked for."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
    """Returns whether a value is an integer, Python's or NumPy's and no bool, of at least `least`.

    >>> [is_count(value) for value in (3, 0, True, 2.0, "epoch")]
    [True, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
