"""The learning rate: its validation, and the number that users read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import arguments
from trainer.core.errors import describe
from trainer.core.types import ArrayLike

Schedule = Callable[[Any], Any]


def as_rate(value: object, expected: str = "a number") -> float:
    """Converts a learning rate to a float.

    Args:
      value: a Python number, an array scalar or a `LearningRate`.
      expected: description of valid values for the error message.

    Raises:
      TypeError: if `value` is not a number.
      ValueError: if `value` is negative or not finite.
    """
    number = arguments.as_number("learning_rate", value, expected)
    arguments.require_non_negative(learning_rate=number)
    return number


class LearningRate:
    """The value of a learning rate at the time of reading: a float32 number on the device.

    It supports the comparisons and arithmetic of a NumPy float32, `float`, and conversion to an array of shape `()`.
    Only these operations wait for the device. It is a copy, so the training step may donate the original.

    Attributes:
      value: the rate, a float32 array of shape `()`.

    Example:
      >>> rate = LearningRate(0.25)
      >>> float(rate), float(rate / 2), bool(rate == 0.25)
      (0.25, 0.125, True)
    """

    def __init__(self, value: ArrayLike):
        is_on_device = isinstance(value, jax.Array)
        self.value: jax.Array = jnp.array(value if is_on_device else arguments.as_numbers("value", value), jnp.float32)

    def numpy(self) -> np.float32:
        """Returns the rate as a NumPy scalar."""
        return np.float32(self.value)

    def assign(self, value: object) -> NoReturn:
        """Raises TypeError, because the object is a copy."""
        raise TypeError("A learning rate that was read is a copy, which cannot be assigned to. Received: "
                        f"assign({describe(value)}). Set the optimizer's: `model.optimizer.learning_rate = value`.")

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)

    def __float__(self) -> float:
        return float(self.value)

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __repr__(self) -> str:
        return f"LearningRate({self.numpy()!s})"

    def __format__(self, specification: str) -> str:
        return format(float(self), specification)

    def __hash__(self) -> int:
        return hash(self.numpy())

    def __eq__(self, other: object) -> Any:
        return self.numpy() == _plain(other)

    def __lt__(self, other: ArrayLike) -> Any:
        return self.numpy() < _plain(other)

    def __le__(self, other: ArrayLike) -> Any:
        return self.numpy() <= _plain(other)

    def __gt__(self, other: ArrayLike) -> Any:
        return self.numpy() > _plain(other)

    def __ge__(self, other: ArrayLike) -> Any:
        return self.numpy() >= _plain(other)

    def __neg__(self) -> Any:
        return -self.numpy()

    def __abs__(self) -> Any:
        return abs(self.numpy())

    def __add__(self, other: ArrayLike) -> Any:
        return self.numpy() + _plain(other)

    def __sub__(self, other: ArrayLike) -> Any:
        return self.numpy() - _plain(other)

    def __rsub__(self, other: Any) -> Any:
        return other - self.numpy()

    def __mul__(self, other: ArrayLike) -> Any:
        return self.numpy() * _plain(other)

    def __truediv__(self, other: ArrayLike) -> Any:
        return self.numpy() / _plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.numpy()

    def __pow__(self, other: ArrayLike) -> Any:
        return self.numpy() ** _plain(other)

    __radd__ = __add__
    __rmul__ = __mul__


def _plain(other: object) -> Any:
    """Returns a `LearningRate` as a NumPy scalar, and other values unchanged."""
    return other.numpy() if isinstance(other, LearningRate) else other
