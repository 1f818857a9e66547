"""A weight of a model, with its path, to read and assign.

Owns which values may be assigned. The model passes the functions that read and write.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core import errors
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import ArrayLike
from trainer.distribute.placement.placement import to_host


class ModelVariable:
    """A weight of a model, with its current value.

    Args:
      path: its path, such as "encoder/Dense_0/kernel", as in patterns of `freeze` and in files of weights.
      number: its index in `Model.get_weights`.
      trainable: whether the default train step trains it.
      read: returns the array.
      write: replaces the array by an array of the same shape and dtype.

    Attributes:
      path, number, trainable: see above.

    Example:
      >>> kernel = model.get_layer("Dense_0").weights[1]  # doctest: +SKIP
      >>> kernel.assign(0.5 * kernel.value)  # doctest: +SKIP
    """

    __slots__ = ("_read", "_write", "number", "path", "trainable")

    def __init__(self, path: str, number: int, trainable: bool, read: Callable[[], jax.Array],
                 write: Callable[[np.ndarray], None]):
        self.path, self.number, self.trainable = path, number, trainable
        self._read, self._write = read, write

    @property
    def name(self) -> str:
        """The last part of the path, such as "kernel"."""
        return self.path.rpartition(SEPARATOR)[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return tuple(self._read().shape)

    @property
    def ndim(self) -> int:
        """The weight's rank."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype."""
        return np.dtype(self._read().dtype)

    @property
    def value(self) -> jax.Array:
        """A copy of the array with the same placement: the next train step reuses the memory of the original."""
        return jnp.copy(self._read())

    def numpy(self) -> np.ndarray:
        """Returns a copy of the whole array on the host, even if it is split over devices."""
        return np.array(to_host(self._read()))

    def assign(self, value: ArrayLike) -> None:
        """Replaces the weight in the model's state; its averages start again, as in `Model.set_weights`.

        Args:
          value: an array-like of the weight's shape, which is cast to the weight's dtype.

        Raises:
          ValueError: for another shape, or numbers that the dtype cannot hold.
          TypeError: if it is not an array of numbers.
        """
        array = np.array(value)  # a copy: JAX would use the memory of the user's array on CPU
        if array.dtype == object or array.dtype.kind in "USmM":
            raise errors.wrong_type("value", value, f"numbers for the weight {self.path!r}")
        if array.shape != self.shape:
            raise ValueError(f"The shape of the value must match the weight {self.path!r}, {self.shape}. "
                             f"Received: a value of shape {array.shape}.")
        self._write(cast_to(self.path, array, self.dtype))

    def assign_add(self, value: ArrayLike) -> None:
        """Adds to the weight; see `assign`."""
        self.assign(self.numpy() + np.asarray(value))

    def assign_sub(self, value: ArrayLike) -> None:
        """Subtracts from the weight; see `assign`."""
        self.assign(self.numpy() - np.asarray(value))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"The weight {self.path!r} is read as a copy: the next train step reuses its memory.")
        return np.asarray(self.numpy(), dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        return f"<ModelVariable path={self.path}, shape={self.shape}, dtype={self.dtype}>"


# Lets functions of `jax.numpy`, which are compiled, take a weight.
jax.tree_util.register_pytree_node(ModelVariable, lambda weight: ((weight.value,), None), lambda _, leaves: leaves[0])


def cast_to(name: str, values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns values in another dtype; raises ValueError for values that the dtype cannot hold."""
    if values.dtype == dtype:
        return values
    if np.iscomplexobj(values) and not jnp.issubdtype(dtype, np.complexfloating):
        raise ValueError(f"The array {name!r} has complex numbers, whose imaginary parts the model's {np.dtype(dtype)} "
                         "cannot hold. Give real numbers.")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
        is_float = jnp.issubdtype(dtype, np.inexact)
        kept = np.isfinite(cast) | ~np.isfinite(values) if is_float else cast.astype(values.dtype) == values
    if not kept.all():
        raise ValueError(f"The array {name!r} has numbers that are too large for the model's {np.dtype(dtype)}; they "
                         f"are {values.dtype}. Compile the model with a wider `precision`.")
    return cast
