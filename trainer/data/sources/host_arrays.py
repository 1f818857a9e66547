"""The arrays in memory that a dataset's rows come from, as an object with an identity.

Owns this identity, and the single conversion and check of users' arrays. Everything derived from a dataset shares the
object, so objects made from the arrays once, such as a copy on the devices, are found again. It must not know these
objects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from trainer.core import arguments
from trainer.core.errors import describe
from trainer.core.types import ArrayTree, PyTree
from trainer.data.sources.arrays import (
    as_arrays,
    assign,
    canonical_dtype,
    check_integers_fit,
    check_rows,
    is_array_tree,
    is_list_of_batches,
    is_text,
    leaf_names,
    map_casting,
    unusable,
)
from trainer.data.sources.buffers import POOL


class HostArrays:
    """A tree of numpy arrays with equal first dimensions; compared by identity.

    Args:
      tree: the arrays, converted and checked as by `of`, which are not written to.
      columns: the name of each array in the user's table, if they were columns.

    Attributes:
      rows: their first dimension.
    """

    def __init__(self, tree: PyTree, columns: Sequence[str] = ()):
        self.tree = tree
        self._columns = columns
        self.rows: int = jax.tree.leaves(tree)[0].shape[0]

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in bytes in JAX's dtypes."""
        return sum(leaf.size * canonical_dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(self.tree))

    @classmethod
    def of(cls, data: ArrayTree, text: bool = False, columns: Sequence[str] = ()) -> HostArrays:
        """Returns a user's arrays, converted and checked once here, and not when rows are gathered.

        Args:
          data: the arrays.
          text: whether arrays may be text, which no step takes; see `require_numbers`.
          columns: as in `HostArrays`.

        Raises:
          DataError: if a leaf is not a numeric array, the numbers of rows differ or are 0, or integers would overflow
            in JAX's dtypes.
        """
        tree = as_arrays(data, text)
        check_rows(tree)
        check_integers_fit(tree)
        return cls(tree, columns)

    def require_numbers(self) -> None:
        """Raises DataError, which names the array and its column, if an array is text."""
        for position, leaf in enumerate(jax.tree.leaves(self.tree)):
            if is_text(leaf):
                column = f" (the column {self._columns[position]!r})" if self._columns else ""
                raise unusable(f"`{leaf_names(self.tree)[position]}`{column}", leaf)

    def gather(self, index: np.ndarray, capacity: int | None = None) -> Any:
        """Returns the rows at `index` of every array: owned copies in their canonical dtypes.

        Args:
          index: integers of shape `(count, ...)`.
          capacity: the first dimension of the results; None for `count`.

        Returns:
          Arrays of shape `(capacity, *index.shape[1:], ...)`, undefined after `count`.

        Raises:
          DataError: if a finite number would become infinite, or an integer, written since, would wrap around.
        """
        def gathered(array: np.ndarray) -> np.ndarray:
            shape = (capacity or len(index), *index.shape[1:], *array.shape[1:])
            # Arrays of objects cannot reuse memory that others may have filled.
            empty = np.empty if array.dtype.hasobject else POOL.empty
            filled = empty(shape, canonical_dtype(array.dtype))
            # `take` is several times faster for short rows, but first copies an array that is not contiguous. In any
            # mode except "raise" it writes to `out` directly.
            if array.flags.c_contiguous and array.flags.aligned and filled.dtype == array.dtype:
                array.take(index, axis=0, out=filled[:len(index)], mode="clip")
            else:
                assign(filled[:len(index)], array[index])
            return filled

        return map_casting(gathered, self.tree)


def split_validation(data: PyTree, validation_split: float) -> tuple[HostArrays, HostArrays]:
    """Splits arrays into a first part for training and a last part for validation, as Keras does.

    Args:
      data: a tree of arrays with equal first dimensions, such as `(x, y, sample_weight)`; None stays None.
      validation_split: the fraction of the rows, between 0 and 1, that goes to validation.

    Returns:
      `(train, validation)`: views, in the structure of `data`.

    Raises:
      TypeError: if the fraction is not a number.
      ValueError: if the fraction is not between 0 and 1 or leaves a part empty, or the data are not arrays.

    Example:
      >>> train, validation = split_validation((np.arange(10), None), 0.2)
      >>> validation.tree
      (array([8, 9]), None)
    """
    arguments.require({"validation_split": validation_split}, "a number between 0 and 1", lambda share: 0 < share < 1)
    is_of_batches = isinstance(data, tuple) and is_list_of_batches(data[0]) and data[1] is None
    if is_of_batches or not is_array_tree(data):
        given = [part for part in data if part is not None] if isinstance(data, tuple) else [data]
        raise ValueError("`validation_split` is only supported for arrays. Received: "
                         f"{', '.join(map(describe, given))}. Pass `validation_data` instead.")
    arrays = HostArrays.of(data)
    split_at = math.floor(arrays.rows * (1 - validation_split))
    if split_at in (0, arrays.rows):
        raise ValueError(f"`validation_split={validation_split}` leaves one part of {arrays.rows} rows empty. "
                         "Provide more rows or another fraction.")
    return (HostArrays(jax.tree.map(lambda array: array[:split_at], arrays.tree)),
            HostArrays(jax.tree.map(lambda array: array[split_at:], arrays.tree)))
