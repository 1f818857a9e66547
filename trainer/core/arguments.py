"""Checks of arguments that are numbers, counts, switches or words.

All rooms follow these rules. A value of the wrong type raises TypeError; a value of the right type that is out of
range, NaN included, raises ValueError. Both messages name the argument, the received value and the expected values. A
bool is not a number, and a float is not a whole number, even with a whole value. NumPy's scalars count as Python's.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from trainer.core.errors import describe, near_names, see, unknown_argument, wrong_type

_CHECKED = re.compile(r"(bool|int|float|str)( \| None)?")
# `pathlib.Path` leaves one slash of two. A single letter is a drive of Windows.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function, signature: inspect.Signature | None = None) -> Function:
    """Returns a function that checks its arguments with the annotation bool, int, float or str, also optional.

    It checks types, and rejects NaN; it checks no ranges. A number may be an array without axes, also a traced array.
    The error for an unknown keyword has similar names.

    Args:
      function: the function.
      signature: its signature, if it takes more than it names.

    Raises:
      TypeError: from the function, for an argument of another type or an unknown name.
      ValueError: from the function, for NaN, and a whole number that no float holds.

    >>> @checked
    ... def scaled(x, factor: float, is_log: bool = False): ...
    >>> scaled(1, factor="2")
    Traceback (most recent call last):
    TypeError: `factor` must be a number. Received: a value of type str.
    """
    known = signature or inspect.signature(function)
    annotations = {name: parameter.annotation for name, parameter in known.parameters.items()}
    kinds = {name: found for name, annotation in annotations.items() if (found := _CHECKED.fullmatch(
        annotation.__name__ if isinstance(annotation, type) else str(annotation)))}

    takes_names_alone = all(each.kind is not each.VAR_KEYWORD for each in known.parameters.values())

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = known.bind(*args, **kwargs).arguments
        except TypeError:  # the function's own error says more, but for names
            given = {}
            if takes_names_alone and (unknown := kwargs.keys() - known.parameters.keys()):
                owner = function.__qualname__.removesuffix(".__init__")
                raise unknown_argument(owner, min(unknown), known.parameters) from None
        for name, value in given.items():
            if name in kinds and not (value is None and kinds[name][2]):
                try:
                    _check_kind(name, value, kinds[name][1], " or None" if kinds[name][2] else "")
                except (TypeError, ValueError) as error:
                    raise _error_that_says_more(error, name, lambda: function(*args, **kwargs)) from None
        return function(*args, **kwargs)

    return cast(Function, call)


def _check_kind(name: str, value: Any, kind: str, or_none: str) -> None:
    is_of_type, expected = _TYPES[kind]
    if not is_of_type(value):
        raise wrong_type(name, value, f"{expected}{or_none}")
    if kind == "float" and isinstance(value, numbers.Real):
        require_number(**{name: value})


def _error_that_says_more(error: Exception, name: str, call: Callable[[], Any]) -> Exception:
    """Returns the error of a function about an argument, such as of its range, if it has one; else the given error."""
    try:
        call()
    except Exception as own:  # of any type, as the argument is wrong
        if isinstance(own, (TypeError, ValueError)) and f"`{name}`" in str(own):
            return own
    return error


def _is_number(value: Any) -> bool:
    dtype = np.dtype(getattr(value, "dtype", type(value) if isinstance(value, numbers.Real) else object))
    return (np.shape(value) == () and dtype.kind in "iufV") or (isinstance(value, int) and not isinstance(value, bool))


def _is_whole_number(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, (bool, np.bool_)), "True or False"),
    "int": (_is_whole_number, "a whole number"),
    "float": (_is_number, "a number"),
    "str": (lambda value: isinstance(value, str), "text"),
}


def as_number(argument: str, value: Any, expected: str = "a number") -> float:
    """Returns `value`, a Python number or an array with one element and no axes, as a float.

    Raises:
      TypeError: `value` is anything else.
    """
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    if is_bool or not hasattr(value, "__float__") or np.shape(value) != ():
        raise TypeError(f"`{argument}` must be {expected}. Received: {describe(value)}.")
    try:
        return float(value)
    except TypeError as error:  # of a value that JAX traces
        raise TypeError(f"`{argument}` must be {expected}, known before anything compiles. Received: "
                        f"{describe(value)}.") from error
    except OverflowError as error:
        raise ValueError(f"`{argument}` must be {expected} that a float can hold. Received: a whole number of "
                         f"{value.bit_length()} bits.") from error


def as_count(argument: str, value: object, minimum: int = 1, expected: str | None = None) -> int:
    """Returns `value`, a whole number of at least `minimum`, as an int.

    Args:
      argument: name of the argument, for the error.
      value: the value.
      minimum: the least value.
      expected: expected values in the error, if the caller accepts more than such a number.

    Raises:
      TypeError: `value` is not a whole number.
      ValueError: `value` is less than `minimum`.

    >>> as_count("batch_size", np.int64(32))
    32
    """
    expected = expected or f"a whole number of at least {minimum}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise wrong_type(argument, value, expected)
    if value < minimum:
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={value}.")
    return int(value)


def as_dtype(argument: str, value: Any) -> np.dtype:
    """Returns `value`, a dtype or its name, as a dtype.

    Raises:
      TypeError: `value` is not a dtype.

    >>> as_dtype("dtype", "float32")
    dtype('float32')
    """
    try:
        if value is None or isinstance(value, (list, tuple, dict)):
            raise TypeError
        return np.dtype(value)
    except TypeError:
        shown = repr(value) if isinstance(value, str) else describe(value)
        raise TypeError(f"`{argument}` must be a dtype, such as 'float32'. Received: {shown}.") from None


def as_numbers(argument: str, value: Any, dtype: Any = None) -> np.ndarray:
    """Returns `value`, an array or a list of numbers, as a NumPy array.

    Raises:
      TypeError: `value` holds anything else, or `dtype` is not a dtype.
    """
    wanted = None if dtype is None else as_dtype("dtype", dtype)
    try:
        array = np.asarray(value, wanted)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind in "OSUmM":
        raise TypeError(f"`{argument}` must be an array of numbers. Received: {describe(value)}.")
    return array


def as_seed(argument: str, value: object) -> int:
    """Returns `value`, a whole number that fits a uint32, as an int.

    Raises:
      TypeError: `value` is not a whole number.
      ValueError: `value` is negative or too large.
    """
    expected = "a whole number from 0 to 2**32 - 1"
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        raise TypeError(f"`{argument}` must be {expected}, from which JAX's keys are made. Received: "
                        f"{describe(value)}. In the place of `jax.random.key(0)`: `{argument}=0`.")
    seed = as_count(argument, value, 0, expected)
    if seed >= 2**32:
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={seed}.")
    return seed


def as_path(argument: str, value: object, expected: str = "the path of a file") -> str:
    """Returns `value`, a path of the local file system that is not empty, as text.

    Every path that a user gives passes here: taken as it is, "gs://bucket/run" would name a local folder "gs:".

    Raises:
      TypeError: `value` is not a path.
      ValueError: `value` is empty, or a URL.

    >>> as_path("log_dir", "gs://bucket/logs")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: `log_dir` must be a path of the local file system. Received: 'gs://bucket/logs', a URL. Mount the \
store and give the path of the mount, or copy files between the store and a local folder. See ...
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise wrong_type(argument, value, expected)
    path = os.fsdecode(value)
    if not path:
        raise ValueError(f"`{argument}` must be {expected}. Received: an empty one.")
    if _SCHEME.match(path):
        raise ValueError(f"`{argument}` must be a path of the local file system. Received: {path!r}, a URL. Mount the "
                         "store and give the path of the mount, or copy files between the store and a local folder. "
                         f"{see('url-as-path')}")
    return path


def as_names(argument: str, value: object) -> list[str]:
    """Returns `value`, a list of at least one name, as a list.

    Raises:
      TypeError: `value` is not a list of strings.
      ValueError: `value` is empty.
    """
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"`{argument}` must be a list of names. Received: {describe(value)}.")
    if not value:
        raise ValueError(f"`{argument}` must be a list of at least one name. Received: an empty one.")
    return list(value)


def as_count_or_word(
    argument: str, value: object, words: Sequence[str], minimum: int = 1, expected: str | None = None
) -> int | str:
    """Returns `value`, a whole number of at least `minimum` as an int, or a string in `words`.

    Args:
      argument: name of the argument, for the error.
      value: the value.
      words: allowed strings.
      minimum: the least number.
      expected: expected values in the error, if the caller accepts more than these.

    Raises:
      TypeError: `value` is neither a whole number nor a string.
      ValueError: `value` is less than `minimum`, or another string.
    """
    expected = expected or f"{', '.join(map(repr, words))} or a whole number of at least {minimum}"
    return check_word(argument, value, words, expected) if isinstance(value, str) else as_count(
        argument, value, minimum, expected)


def check_count(argument: str, value: object, minimum: int = 1, optional: bool = False) -> None:
    """Raises an error unless `value` is a whole number of at least `minimum`, or None if `optional`.

    Raises:
      TypeError: `value` is not a whole number.
      ValueError: `value` is less than `minimum`.
    """
    check_counts(minimum, optional=optional, **{argument: value})


def check_counts(minimum: int, /, *, optional: bool = False, **counts: object) -> None:
    """Raises an error unless every count is a whole number of at least `minimum`, or None if `optional`.

    Raises:
      TypeError: a count is not a whole number.
      ValueError: a count is less than `minimum`.

    >>> check_counts(1, optional=True, steps=3, batch_size=None)
    """
    expected = f"a whole number of at least {minimum}{' or None' if optional else ''}"
    for argument, value in counts.items():
        if value is not None or not optional:
            as_count(argument, value, minimum, expected)


def check_word(argument: str, value: object, words: Collection[str], expected: str | None = None) -> str:
    """Returns `value`, a string in `words`.

    Args:
      argument: name of the argument, for the error.
      value: the value.
      words: allowed strings.
      expected: expected values in the error, if the caller accepts more than these.

    Raises:
      TypeError: `value` is not a string.
      ValueError: `value` is another string. The message suggests a similar word.
    """
    expected = expected or f"one of {', '.join(map(repr, words))}"
    if not isinstance(value, str):
        raise wrong_type(argument, value, expected)
    if value not in words:
        near = near_names(value, words, limit=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={value!r}.{hint}")
    return value


def check_verbose(value: object) -> int:
    """Returns `verbose` as a number: "auto" is 1, and True and False are 1 and 0.

    Raises:
      TypeError: `value` is neither a whole number nor a string.
      ValueError: `value` is not 0, 1, 2 or "auto".
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
    """Raises an error unless `value` is a whole number of at least 1, or a collection of these.

    Raises:
      TypeError: `value` is anything else.
      ValueError: a number is less than 1.
    """
    is_collection = isinstance(value, Collection) and not isinstance(value, str)
    for number in value if is_collection else [value]:
        as_count("validation_freq", number, 1, "a whole number of at least 1, or a collection of these")


def require(arguments: dict[str, Any], expected: str, holds: Callable[[float], bool]) -> None:
    """Raises an error unless every argument is a number for which `holds` is true.

    Args:
      arguments: values by the names of their arguments.
      expected: expected values in the error.
      holds: the condition.

    Raises:
      TypeError: an argument is not a number.
      ValueError: the condition is false for a number.
    """
    for argument, value in arguments.items():
        number = as_number(argument, value, expected)
        if not holds(number):
            raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={number:g}.")


def require_number(**arguments: Any) -> None:
    """Raises an error unless every argument is a number, finite or infinite, but not NaN."""
    require(arguments, "a number, not NaN", lambda number: not math.isnan(number))


def require_finite(**arguments: Any) -> None:
    """Raises an error unless every argument is a number that is finite in float32, the dtype on devices."""
    require(arguments, "a finite number", math.isfinite)
    _require_float32(arguments)


def require_positive(**arguments: Any) -> None:
    """Raises an error unless every argument is a number that is finite and above 0 in float32, as on devices."""
    require(arguments, "a number above 0", lambda number: 0 < number < math.inf)
    _require_float32(arguments, float(np.finfo(np.float32).tiny))


def require_share(**arguments: Any) -> None:
    """Raises an error unless every argument is a number in [0, 1]."""
    require(arguments, "a number in [0, 1]", lambda number: 0 <= number <= 1)


def require_non_negative(**arguments: Any) -> None:
    """Raises an error unless every argument is a number of at least 0 that is finite in float32, as on devices."""
    require(arguments, "a number of at least 0", lambda number: 0 <= number < math.inf)
    _require_float32(arguments)


def require_decay_rate(**arguments: Any) -> None:
    """Raises an error unless every argument is a number in [0, 1), the share of an average that survives an update."""
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
    """Raises ValueError for a number that float32 would turn infinite, or 0 because it is below `smallest`."""
    for argument, value in arguments.items():
        if not smallest <= abs(float(value)) <= float(np.finfo(np.float32).max):
            raise ValueError(f"`{argument}` must be a number that float32 can hold. Received: {argument}={value:g}.")
