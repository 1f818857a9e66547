"""Checks of the arguments of feature columns: keys, shapes, dtypes and numbers of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.core import arguments
from trainer.core.errors import wrong_type

STRING = "string"
MAX_BUCKETS = 2**31 - 1  # ids are int32 on the device


def as_key(argument: str, value: object) -> str:
    """Returns the key of a feature.

    Raises:
      TypeError: if `value` is not a str.
      ValueError: if `value` is empty.
    """
    if not isinstance(value, str):
        raise wrong_type(argument, value, "the key of a feature, a str")
    if not value:
        raise ValueError(f"`{argument}` must be the key of a feature. Received: an empty one.")
    return value


def as_buckets(argument: str, value: object) -> int:
    """Returns a number of buckets, from 1 to the largest int32.

    Raises:
      TypeError: if `value` is not an integer.
      ValueError: if `value` is less than 1 or too large.
    """
    expected = f"a whole number from 1 to {MAX_BUCKETS}"
    count = arguments.as_count(argument, value, 1, expected)
    if count > MAX_BUCKETS:
        raise ValueError(f"`{argument}` must be {expected}. Received: {argument}={count}.")
    return count


def as_shape(value: object) -> tuple[int, ...]:
    """Returns the shape of a numeric feature's rows; an integer is a shape with one axis.

    Raises:
      TypeError: if an axis is not an integer.
      ValueError: if an axis is less than 1.
    """
    axes = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return tuple(arguments.as_count("shape", axis) for axis in axes)


def as_dtype_name(argument: str, value: Any) -> str:
    """Returns "string" or the name of a NumPy dtype.

    Args:
      argument: name of the argument, for error messages.
      value: a name, a NumPy or JAX dtype, `str`, or an object with a `name`, such as TensorFlow's dtypes.

    Raises:
      TypeError: if `value` is not a dtype.

    >>> as_dtype_name("dtype", str), as_dtype_name("dtype", np.int32)
    ('string', 'int32')
    """
    name = getattr(value, "name", value)
    if value in (str, bytes) or (isinstance(name, str) and name in (STRING, "str", "bytes")):
        return STRING
    try:
        found = np.dtype(name)
    except TypeError as error:
        raise wrong_type(argument, value, "the dtype of a feature, such as 'string', 'int64' or 'float32'") from error
    return STRING if found.kind in "SUO" else found.name


def as_category_dtype(argument: str, value: object) -> str:
    """Returns "string" or the name of an integer type.

    Raises:
      TypeError: if `value` is not a dtype.
      ValueError: if `value` is another dtype.
    """
    name = as_dtype_name(argument, value)
    if name != STRING and np.dtype(name).kind not in "iu":
        raise ValueError(f"`{argument}` must be 'string' or an integer type. Received: {argument}={name!r}.")
    return name


def as_numeric_dtype(argument: str, value: object) -> str:
    """Returns the name of an integer or floating-point type.

    Raises:
      TypeError: if `value` is not a dtype.
      ValueError: if `value` is another dtype.
    """
    name = as_dtype_name(argument, value)
    if name == STRING or np.dtype(name).kind not in "iuf":
        raise ValueError(f"`{argument}` must be a type of whole or real numbers. Received: {argument}={name!r}.")
    return name


def as_text(value: str | bytes) -> bytes:
    """Returns a string as bytes, as in TensorFlow; str is encoded as UTF-8."""
    return value if isinstance(value, bytes) else value.encode()
