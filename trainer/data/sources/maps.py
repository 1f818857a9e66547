"""Calls of the functions that a user gives to `map`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def call_map(fn: Callable[..., Any], element: Any, *first: Any) -> Any:
    """Returns the value of a function for an element, a tuple as separate arguments.

    Args:
      fn: the user's function.
      element: a row or a batch.
      first: arguments before the element.

    Raises:
      TypeError: if the function does not take so many arguments.
    """
    parts = element if isinstance(element, tuple) else (element,)
    try:
        return fn(*first, *parts)
    except TypeError:
        count = len(first) + len(parts)
        if _takes(fn, count):
            raise
        names = [*["rng"][:len(first)], *(["x", "y", "w"][:len(parts)] if len(parts) <= 3 else ["*parts"])]
        raise TypeError(
            f"`map` gives its function each part of an element as an argument of its own, here {count} in all. "
            f"Received: a function with the parameters {inspect.signature(fn)}. Write `lambda {', '.join(names)}: ...`."
        ) from None


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Returns whether a function may be called with `count` arguments by position."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins have none
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
