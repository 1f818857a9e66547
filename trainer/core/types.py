"""Types of users' data, and the detection of Keras's objects without an import of Keras.

The types are wide on purpose: data are checked when they are used, with a message that names the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np


class SupportsArray(Protocol):
    """An object that numpy converts to an array: a tensor of torch or TensorFlow, a column of pandas..."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the values."""


class SupportsBatches(Protocol):
    """An object with a batch for each number below its length, such as a `keras.utils.PyDataset`."""

    def __len__(self) -> int:
        """Returns the number of batches."""

    def __getitem__(self, index: int, /) -> Any:
        """Returns a batch."""


@runtime_checkable
class ReadInParts(Protocol):
    """An array that is not in memory: each device's part is read by itself.

    Attributes:
      name: name for messages.
      shape: its shape.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See above."""

    def read_part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part, given by a slice for each dimension, in memory that nothing else uses."""


ArrayLike: TypeAlias = jax.Array | np.ndarray | SupportsArray | float | Sequence[Any]
"""An array, rows first, or a list of numbers."""

ArrayTree: TypeAlias = ArrayLike | Sequence["ArrayTree"] | Mapping[str, "ArrayTree"]
"""An array, or a list, tuple or dict of arrays, at any depth."""

PyTree: TypeAlias = Any
"""A tree of arrays, such as parameters: any nesting of containers that `jax.tree` knows."""

Layout: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
"""Sharding of an array: for each dimension the mesh axis that splits it, a tuple of several axes, or None."""

Data: TypeAlias = ArrayTree | Iterable[Any] | SupportsBatches
"""Arrays; or a `trainer.data.Dataset`, a generator, a Grain dataset, a `tf.data.Dataset`, a torch `DataLoader`, or
anything else that yields batches `x`, `(x, y)` or `(x, y, sample_weight)`."""

Shuffle: TypeAlias = bool | Literal["batch"]
Verbose: TypeAlias = int | Literal["auto"]
"""0, 1, 2 or "auto"."""

Phase: TypeAlias = Literal["train", "test", "predict"]
"""Kind of a step."""

Count: TypeAlias = int | float
"""A number of elements; `math.inf` if there is no end to them."""

_KERAS = ("keras", "tf_keras", "tensorflow")


def keras_class(value: object, name: str | None = None) -> type | None:
    """Returns the first class of Keras among the classes of an object, or the bases of a class; None if there is none.

    Args:
      value: the object or the class.
      name: the name that the class must have, such as "Metric"; any by default.

    >>> keras_class(3)
    """
    classes = (value if isinstance(value, type) else type(value)).__mro__
    return next((cls for cls in classes
                 if cls.__module__.partition(".")[0] in _KERAS and name in (None, cls.__name__)), None)
