"""The checks of arguments that are numbers, counts, switches or words.

Owns one rule, for every room: a value of the wrong type raises TypeError; a value of the right type that is out of
range, NaN included, raises ValueError; both messages name the argument, what was received and what was expected. A bool
is no number, and a float is no whole number, also if its value is whole. NumPy's scalars count as Python's.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from trainer.core.errors import describe, near_names, wrong_type


def as_number(argument: str, value: Any, expected: str = "a number") -> float:
    """Returns `value`, a Python number or an array with one element and no axes, as a float.

    Raises:
      TypeError: if it is anything else.
    """
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    if is_bool or not hasattr(value, "__float__") or np.shape(value) != ():
        raise TypeError(f"`{argument}` must be {expected}. Received: {describe(value)}.")
    return float(value)


def as_count(argument: str, value: Any, minimum: int = 1, expected: str | None = None) -> int:
    """Returns `value`, a whole number of at least `minimum`, as an int.

    Args:
      argument: the name of the argument, for the error.
      value: what was given.
      minimum: the least value.
      expected: what the error asks for, if more than such a number would do.

    Raises:
      TypeError: if it is no whole number.
      ValueError: if it is less than `minimum`.

    >>> as_count("batch_size", np.int64(32))
    32
    """
    expected = expected or f"a whole number of at least {minimum}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise wrong_type(argument, value, expected)
    if value < minimum:
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={value}.")
    return int(value)


def as_seed(argument: str, value: Any) -> int:
    """Returns `value`, a whole number that a uint32 holds, as an int.

    Raises:
      TypeError: if it is no whole number.
      ValueError: if it is negative or too large.
    """
    expected = "a whole number from 0 to 2**32 - 1"
    seed = as_count(argument, value, 0, expected)
    if seed >= 2**32:
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={seed}.")
    return seed


def as_path(argument: str, value: Any, expected: str = "the path of a file") -> str:
    """Returns `value`, a path that is not empty, as text.

    Raises:
      TypeError: if it is no path.
      ValueError: if it is empty.
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise wrong_type(argument, value, expected)
    path = os.fsdecode(value)
    if not path:
        raise ValueError(f"`{argument}` must be {expected}. Received: an empty one.")
    return path


def as_names(argument: str, value: Any) -> list[str]:
    """Returns `value`, a list of at least one name, as a list.

    Raises:
      TypeError: if it is no list of texts.
      ValueError: if it is empty.
    """
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"`{argument}` must be a list of names. Received: {describe(value)}.")
    if not value:
        raise ValueError(f"`{argument}` must be a list of at least one name. Received: an empty one.")
    return list(value)


def as_count_or_word(
    argument: str, value: Any, words: Sequence[str], minimum: int = 1, expected: str | None = None
) -> int | str:
    """Returns `value`, a whole number of at least `minimum` as an int, or one of `words`.

    Args:
      argument: the name of the argument, for the error.
      value: what was given.
      words: the strings that are allowed.
      minimum: the least number.
      expected: what the error asks for, if more than these would do.

    Raises:
      TypeError: if it is neither a whole number nor a string.
      ValueError: if it is less than `minimum`, or another string.
    """
    expected = expected or f"{', '.join(map(repr, words))} or a whole number of at least {minimum}"
    return check_word(argument, value, words, expected) if isinstance(value, str) else as_count(
        argument, value, minimum, expected)


def check_count(argument: str, value: Any, minimum: int = 1, optional: bool = False) -> None:
    """Raises an error unless `value` is a whole number of at least `minimum`, or None if it is `optional`.

    Raises:
      TypeError: if it is no whole number.
      ValueError: if it is less than `minimum`.
    """
    if (value is not None or not optional) and not (type(value) is int and value >= minimum):
        as_count(argument, value, minimum, f"a whole number of at least {minimum}{' or None' if optional else ''}")


def check_word(argument: str, value: Any, words: Collection[str], expected: str | None = None) -> str:
    """Returns `value`, which is one of `words`.

    Args:
      argument: the name of the argument, for the error.
      value: what was given.
      words: the strings that are allowed.
      expected: what the error asks for, if more than these would do.

    Raises:
      TypeError: if it is no string.
      ValueError: if it is another string; near words are listed.
    """
    expected = expected or f"one of {', '.join(map(repr, words))}"
    if not isinstance(value, str):
        raise wrong_type(argument, value, expected)
    if value not in words:
        near = near_names(value, words, limit=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={value!r}.{hint}")
    return value


def check_verbose(value: Any) -> int:
    """Returns `verbose` as a number: "auto" is 1, and True and False are 1 and 0.

    Raises:
      TypeError: if it is neither a whole number nor a string.
      ValueError: if it is none of 0, 1, 2 and "auto".
    """
    expected = "0, 1, 2 or 'auto'"
    if isinstance(value, str):
        check_word("verbose", value, ["auto"], expected)
        return 1
    number = int(value) if isinstance(value, (bool, np.bool_)) else as_count("verbose", value, 0, expected)
    if number > 2:
        raise ValueError(f"`verbose` must be {expected}. Received: verbose={number}.")
    return number


def check_validation_freq(value: Any) -> None:
    """Raises an error unless `value` is a whole number of at least 1 or a collection of these.

    Raises:
      TypeError: if it is anything else.
      ValueError: if a number is less than 1.
    """
    is_collection = isinstance(value, Collection) and not isinstance(value, str)
    for number in value if is_collection else [value]:
        as_count("validation_freq", number, 1, "a whole number of at least 1, or a collection of these")


def require(arguments: dict[str, Any], expected: str, holds: Callable[[float], bool]) -> None:
    """Raises unless every argument is a number for which `holds` is true.

    Args:
      arguments: what was given, by the names of the arguments.
      expected: what the error asks for.
      holds: the condition.

    Raises:
      TypeError: if an argument is no number.
      ValueError: if the condition does not hold for a number.
    """
    for argument, value in arguments.items():
        number = as_number(argument, value, expected)
        if not holds(number):
            raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={number:g}.")


def require_number(**arguments: Any) -> None:
    """Raises unless every argument is a number, infinite or not; NaN is none."""
    require(arguments, "a number, not NaN", lambda number: not math.isnan(number))


def require_finite(**arguments: Any) -> None:
    """Raises unless every argument is a number that is finite in float32, in which devices compute."""
    require(arguments, "a finite number", math.isfinite)
    _require_float32(arguments)


def require_positive(**arguments: Any) -> None:
    """Raises unless every argument is a number that is finite and above 0 in float32, in which devices compute."""
    require(arguments, "a number above 0", lambda number: 0 < number < math.inf)
    _require_float32(arguments, float(np.finfo(np.float32).tiny))


def require_share(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1]."""
    require(arguments, "a number in [0, 1]", lambda number: 0 <= number <= 1)


def require_non_negative(**arguments: Any) -> None:
    """Raises unless every argument is a number of at least 0 that is finite in float32, in which devices compute."""
    require(arguments, "a number of at least 0", lambda number: 0 <= number < math.inf)
    _require_float32(arguments)


def require_decay_rate(**arguments: Any) -> None:
    """Raises unless every argument is a number in [0, 1): the share of an average that survives an update."""
    require(arguments, "a number in [0, 1)", lambda number: 0 <= number < 1)


def require_bool(**arguments: Any) -> None:
    """Raises TypeError unless every argument is True or False."""
    for argument, value in arguments.items():
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_type(argument, value, "True or False")


def require_text(**arguments: Any) -> None:
    """Raises TypeError unless every argument is a str."""
    for argument, value in arguments.items():
        if not isinstance(value, str):
            raise wrong_type(argument, value, "text")


def require_functions(**arguments: Any) -> None:
    """Raises TypeError unless every argument is a function or None."""
    for argument, value in arguments.items():
        if value is not None and not callable(value):
            raise wrong_type(argument, value, "a function")


def _require_float32(arguments: dict[str, Any], smallest: float = 0.0) -> None:
    """Raises ValueError for a number that would become infinite in float32, or 0 as it is below `smallest`."""
    for argument, value in arguments.items():
        if not smallest <= abs(float(value)) <= float(np.finfo(np.float32).max):
            raise ValueError(f"`{argument}` must be a number that float32 can hold. Received: {argument}={value:g}.")
