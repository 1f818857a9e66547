"""Calls of the functions that a user gives to `map` and `random_map`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

ElementMap = tuple[Callable[..., Any], int | None]
"""A function of elements; and the seed of the random generator that it takes first, None without."""


def apply_maps(maps: tuple[ElementMap, ...], element: Any, place: tuple[int, int]) -> Any:
    """Returns an element after some maps.

    The random numbers of a map depend on its seed, its position among the maps and the place only, so that they are the
    same after an interruption, and on any number of threads, devices and processes.

    Args:
      maps: the maps, the first map first.
      element: a row or a batch.
      place: the pass, and the index of the row or the batch.
    """
    for order, (fn, seed) in enumerate(maps):
        element = call_map(fn, element, *(() if seed is None else (np.random.default_rng([seed, order, *place]),)))
    return element


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
