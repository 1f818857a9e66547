"""Comparison of the trainer's results with Keras's: numbers with numbers, errors with errors."""

from __future__ import annotations

import collections
import inspect
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

#: How many comparisons were made, by room.
COUNTS: collections.Counter[str] = collections.Counter()


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns the result of a function as a NumPy array, or the error that it raises."""
    try:
        result = function(*arguments, **options)
    except Exception as error:
        return error
    return np.asarray(result)


def are_equal(ours: Any, theirs: Any, rtol: float = 3e-5, atol: float = 2e-6) -> bool:
    """Returns whether two outcomes are errors both, or arrays of one shape and of about the same numbers."""
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        return isinstance(ours, Exception) and isinstance(theirs, Exception)
    if ours.shape != theirs.shape:
        return False
    if ours.dtype.kind not in "biuf" or theirs.dtype.kind not in "biuf":
        return ours.dtype.kind == theirs.dtype.kind and bool(np.all(ours == theirs))
    return np.allclose(ours.astype(float), theirs.astype(float), rtol=rtol, atol=atol, equal_nan=True)


def check_equal(room: str, ours: Any, theirs: Any, what: str, **tolerances: float) -> None:
    """Raises AssertionError unless two outcomes are numbers, and equal; counts the comparison."""
    COUNTS[room] += 1
    assert not isinstance(theirs, Exception), f"{what}: no number to compare with, but {shown(theirs)}"
    assert are_equal(ours, theirs, **tolerances), f"{what}: {shown(ours)} is not Keras's {shown(theirs)}"


def shown(value: Any) -> str:
    """Returns an outcome as a short text."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:200]}"
    return f"{np.array2string(value, threshold=8)} of shape {value.shape}"


def generator(*parts: Any) -> np.random.Generator:
    """Returns a random generator that is the same in each run for the same parts."""
    return np.random.default_rng(zlib.crc32(repr(parts).encode()))


def public_names(module: Any, is_kind: Callable[[Any], bool]) -> set[str]:
    """Returns the public names of a module whose values are of a kind."""
    return {name for name in dir(module) if not name.startswith("_") and is_kind(getattr(module, name))}


def without(names: Iterable[str], excluded: Iterable[str]) -> set[str]:
    """Returns names without others, each of which must be among them."""
    names, excluded = set(names), set(excluded)
    assert excluded <= names, f"no such names: {sorted(excluded - names)}"
    return names - excluded


is_class = inspect.isclass
is_function = inspect.isfunction
