"""Arrays of users, and batches as trees of them: the checks, the conversions, and the gathering of rows.

Owns the definition of an array, of a valid tree of arrays and of a batch, and the memory that rows are gathered into.
It must not copy a whole array: dtypes are converted when rows are gathered.
"""

from __future__ import annotations

import collections
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trainer.core.errors import MAX_ITEMS, describe, see
from trainer.core.tree_paths import argument_names
from trainer.core.types import ArrayTree, PyTree

_TEXT_KINDS = "OSTU"  # of objects, bytes, and strings of any and of one length
_ALIGNMENT = 64  # in bytes, of buffers that XLA uses without a copy


class DataError(ValueError):
    """Unusable data; while reading, the message names the batch."""


Batch = Any
"""A tree of numpy arrays with equal first dimensions, the rows: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""


def unpack_x_y_sample_weight(batch: ArrayTree) -> tuple[Any, Any, Any]:
    """Returns `(x, y, sample_weight)` of a batch, with None for missing parts.

    Args:
      batch: `x` alone (an array or a dict), or a tuple or list of one to three parts.

    Raises:
      ValueError: if a tuple has another number of parts.

    Example:
      >>> unpack_x_y_sample_weight((1, 2))
      (1, 2, None)
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise ValueError("A batch must be `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`. "
                         f"Received: a {type(batch).__name__} of {len(batch)} parts, {describe(batch)}.")
    return (*batch, None, None)[:3]


def pack_x_y_sample_weight(
    x: ArrayTree, y: ArrayTree | None = None, sample_weight: ArrayTree | None = None
) -> Batch:
    """Returns a batch of the given parts: the inverse of `unpack_x_y_sample_weight`.

    Returns:
      `x` itself if it is the only argument and is not a tuple or list; otherwise `(x,)`, `(x, y)` or
      `(x, y, sample_weight)`.

    Example:
      >>> pack_x_y_sample_weight(1), pack_x_y_sample_weight(1, 2), pack_x_y_sample_weight((1, 2))
      (1, (1, 2), ((1, 2),))
    """
    if sample_weight is not None:
        return x, y, sample_weight
    if y is not None:
        return x, y
    return (x,) if isinstance(x, (tuple, list)) else x


def shapes_key(batch: PyTree) -> tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]:
    """Returns a hashable key of the structure, shapes and dtypes of a batch, or of a stack of batches."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def as_batch(element: PyTree, text: bool = False) -> Batch:
    """Returns an element of a user's pipeline as a batch of numpy arrays in canonical dtypes.

    Arrays that need no conversion are not copied, so the batch may share memory with the pipeline.

    Args:
      element: the element.
      text: whether arrays may be text.

    Raises:
      DataError: if a leaf is unusable, integers would overflow or floats become infinite, the numbers of rows differ,
        or there are no rows.
    """
    arrays = as_arrays(element, text)
    check_integers_fit(arrays)
    batch = map_casting(lambda leaf: leaf.astype(canonical_dtype(leaf.dtype), copy=False), arrays)
    check_rows(batch, " If the data yield single rows, make batches of them: torch's `DataLoader(data, "
                      "batch_size=32)`, or `.batch(32)`; a packed graph, as one row, is a batch by `array[None]`.")
    return batch


class HostArrays:
    """A tree of numpy arrays with equal first dimensions; compared by identity.

    Everything derived from a dataset shares this object, so copies on the devices are found again.

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


def canonical_dtype(dtype: np.dtype) -> np.dtype:
    """Returns JAX's dtype for arrays of `dtype`: 32 bits instead of 64 unless `jax_enable_x64` is set.

    The dtype of text, which JAX lacks, is unchanged.
    """
    if dtype.kind in _TEXT_KINDS:
        return dtype
    if dtype.type in (np.longdouble, np.clongdouble):  # extended precision, which JAX lacks
        dtype = np.dtype(np.float64 if dtype.kind == "f" else np.complex128)
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def map_casting(function: Callable[[np.ndarray], Any], tree: PyTree) -> Any:
    """Returns a tree of arrays with `function`, which casts to canonical dtypes, applied to each.

    The processor flags an overflow of floats during the cast, so the check takes no extra time. Integers are compared
    by `assign`.

    Raises:
      DataError: if a finite number would become infinite, or an integer would wrap around.
    """
    leaves, treedef = jax.tree.flatten(tree)
    results = []
    with np.errstate(over="raise"):
        for position, leaf in enumerate(leaves):
            try:
                results.append(function(leaf))
            except OverflowError:
                check_integers_fit(tree)
                raise
            except FloatingPointError:
                dtype = canonical_dtype(leaf.dtype)
                raise DataError(f"`{leaf_names(tree)[position]}` must fit into {dtype}, the dtype that JAX gives to "
                                f"{leaf.dtype} unless `jax_enable_x64` is set. Received: {describe(leaf)} with numbers "
                                "that would become infinite. Scale or clip them, or set `jax_enable_x64` before the "
                                "data are passed.") from None
    return jax.tree.unflatten(treedef, results)


def assign(to: np.ndarray, values: np.ndarray) -> None:
    """Casts values to another array; raises OverflowError if an integer wraps around, as values written later may."""
    to[...] = values
    if values.dtype.kind in "iu" and to.dtype.itemsize < values.dtype.itemsize and (to != values).any():
        raise OverflowError


def is_array_tree(value: object) -> bool:
    """Returns whether `value` is an array, a list of numbers, or a nonempty tree of such leaves."""
    leaves = jax.tree.leaves(value, is_leaf=is_leaf)
    return bool(leaves) and all(
        hasattr(leaf, "__array__") or isinstance(leaf, numbers.Number) or (isinstance(leaf, list) and is_leaf(leaf))
        for leaf in leaves)


def is_list_of_batches(value: object) -> bool:
    """Returns whether `value` is a list of batches: of tuples or lists of one to three arrays or trees of arrays.

    A list of arrays is not a list of batches, but several inputs.

    >>> x, y = np.zeros((2, 3)), np.zeros(2)
    >>> is_list_of_batches([(x, y), (x, y)]), is_list_of_batches([x, x])
    (True, False)
    """
    return (isinstance(value, list) and bool(value) and not is_leaf(value)
            and all(isinstance(item, (tuple, list)) and not is_leaf(item) and 1 <= len(item) <= 3
                    and is_array_tree(tuple(item)) for item in value))


def are_rows(value: object) -> bool:
    """Returns whether `value` is a tree of arrays whose rows are data, and not a list of batches.

    >>> x, y = np.zeros((2, 3)), np.zeros(2)
    >>> are_rows([x, x]), are_rows([(x, y), (x, y)])
    (True, False)
    """
    return is_array_tree(value) and not is_list_of_batches(value)


def is_text(array: np.ndarray) -> bool:
    """Returns whether all values of an array are strings, or bytes of text; of objects, None and NaN are missing."""
    if array.dtype.kind != "O":
        return array.dtype.kind in _TEXT_KINDS
    values = [value for value in array.flat if not _is_missing(value)]
    return bool(values) and all(isinstance(value, (str, bytes)) for value in values)


def _is_missing(value: Any) -> bool:
    if value is None:
        return True
    differs = value != value  # NaN and NaT; an array, or NA, for values of these types
    return isinstance(differs, (bool, np.bool_)) and bool(differs)


def as_arrays(tree: PyTree, text: bool = False) -> Any:
    """Returns `tree` with every leaf as a numpy array, without copying numpy arrays.

    A list of numbers becomes an array, and a list of Pillow images an array of their pixels; any other list at the top
    becomes a tuple. Torch and TensorFlow tensors are recognized by their methods.

    Args:
      tree: the arrays.
      text: whether arrays may be text, which stays on the host.

    Raises:
      DataError: if a leaf is a scalar, a masked array, or neither boolean nor numeric, nor text where that is allowed.
    """
    if isinstance(tree, list) and not _is_number_list(tree):
        tree = tuple(tree)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    arrays = []
    for position, leaf in enumerate(leaves):
        array = _to_numpy(leaf, functools.partial(_name_of, tree, position))
        # By JAX, because numpy does not treat bfloat16 and similar dtypes as numbers, but differences of times.
        is_numeric = array.dtype == np.bool_ or (jnp.issubdtype(array.dtype, np.number) and array.dtype.kind != "m")
        is_usable = is_numeric or (text and is_text(array))
        if not is_usable or array.ndim == 0 or np.ma.isMaskedArray(leaf):
            raise unusable(_name_of(tree, position), array, is_usable, _other_columns(leaf))
        arrays.append(array)
    return jax.tree.unflatten(treedef, arrays)


def _other_columns(table: Any) -> str:
    """Returns the columns of a data frame that are not NumPy's numbers, with dtypes; an empty string for none."""
    columns = list(zip(table.columns, table.dtypes, strict=False)) if hasattr(table, "columns") else []
    others = [f"{name!r} ({dtype})" for name, dtype in columns
              if not isinstance(dtype, np.dtype) or dtype.kind not in "iufc"]
    more = f", ... ({len(others)} in all)" if len(others) > MAX_ITEMS else ""
    return f"{', '.join(others[:MAX_ITEMS])}{more}"


def _name_of(tree: PyTree, position: int) -> str:
    return f"`{leaf_names(tree)[position]}`"


def column_array(column: Any) -> np.ndarray:
    """Returns the array of a table's column: an array, or a sequence of numbers, arrays or images, an item per row.

    Raises:
      DataError: if the shapes of the rows differ, or a row is not an array.

    >>> column_array([np.zeros(3), np.ones(3)]).shape
    (2, 3)
    """
    if hasattr(column, "__array__") or _is_number_list(column):
        return _to_numpy(column)
    return _stacked([_to_numpy(row) for row in column])


def check_integers_fit(tree: PyTree) -> None:
    """Raises DataError if integers of `tree`, a tree of numpy arrays, would overflow in their canonical dtype.

    Reads only the values of arrays that JAX would reduce from 64 to 32 bits.
    """
    for position, array in enumerate(jax.tree.leaves(tree)):
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
            continue
        dtype = canonical_dtype(array.dtype)
        if dtype.itemsize == array.dtype.itemsize:
            continue
        bounds, low, high = np.iinfo(dtype), int(array.min()), int(array.max())
        if low < bounds.min or high > bounds.max:
            name = leaf_names(tree)[position]
            raise DataError(f"`{name}` must fit into {dtype}, the dtype that JAX gives to {array.dtype} unless "
                            f"`jax_enable_x64` is set: {bounds.min} to {bounds.max}. Received: {describe(array)} with "
                            f"values from {low} to {high}, which would wrap around. Subtract an offset, use "
                            "`.astype(\"float32\")` where its 24 bits of precision will do, or set `jax_enable_x64` "
                            "before the data are passed.")


def check_rows(tree: PyTree, hint: str = "") -> int:
    """Returns the common number of rows of all leaves of `tree`, a tree of numpy arrays.

    Args:
      tree: the arrays.
      hint: a sentence for the error of unequal rows.

    Raises:
      DataError: if there are no arrays or no rows, or the first dimensions differ.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise DataError(f"Expected at least one array. Received: {describe(tree)}, which is empty.")
    rows = leaves[0].shape[0]
    if any(leaf.shape[0] != rows for leaf in leaves):
        pairs = list(zip(leaf_names(tree), leaves, strict=True))
        shapes = ", ".join(f"`{name}` of shape {leaf.shape}" for name, leaf in pairs[:MAX_ITEMS])
        more = "" if len(pairs) <= MAX_ITEMS else f", ... ({len(pairs)} arrays in all)"
        lists = [f"`{name[:-3]}=np.stack({name[:-3]})`" for name, _ in pairs if name.endswith("[1]")]
        if lists:
            hint = f" A list of arrays is as many inputs; if each array is a row, pass {' and '.join(lists)}."
        raise DataError("All arrays must have the same number of rows (the first dimension). "
                        f"Received: {shapes}{more}.{hint} {see('unequal-rows')}")
    if rows == 0:
        raise DataError(f"Expected at least one row. Received: `{leaf_names(tree)[0]}` of shape {leaves[0].shape}, "
                        "which is empty.")
    return rows


def is_leaf(value: object) -> bool:
    """Returns whether `value` is a leaf although JAX would look inside: a list of numbers or images, or an iterator."""
    if isinstance(value, list):
        return _is_number_list(value) or _is_image_list(value)
    return hasattr(value, "__next__")


def leaf_names(tree: PyTree) -> list[str]:
    """Returns a name for each leaf of a user's tree: see `tree_paths.argument_names`."""
    return argument_names(tree, is_leaf)


def _is_number_list(value: object) -> bool:
    return isinstance(value, list) and all(_is_number_or_row(item) for item in value)


def _is_image_list(value: object) -> bool:
    # Pillow images, each a row: they are not arrays, but expose their memory as an array.
    return isinstance(value, list) and bool(value) and all(
        hasattr(item, "__array_interface__") and not hasattr(item, "__array__") for item in value)


def _is_number_or_row(item: object) -> bool:
    if isinstance(item, (list, tuple)):
        return all(_is_number_or_row(part) for part in item)
    return isinstance(item, (numbers.Number, str, np.bool_))


def _to_numpy(value: Any, name: Callable[[], str] = lambda: "A value") -> np.ndarray:
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if isinstance(value, jax.core.Tracer):
        raise DataError(f"{name()} is an array that is being traced, by `jax.jit` or `jax.grad`, and has no numbers "
                        "yet. `fit`, `evaluate` and `predict` take arrays, and compile their steps: call them without "
                        "`jax.jit`. Inside of a step, `self.apply(params, state, x)` returns outputs.")
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
    elif hasattr(value, "numpy") and not hasattr(value, "__array__"):
        value = value.numpy()
    try:
        if _is_image_list(value):
            return _stacked([np.asarray(image) for image in value])
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        hint = ""
        if isinstance(value, list) and all(isinstance(item, tuple) for item in value):
            hint = " If its tuples are batches, make arrays of their lists: `[(np.array(x), np.array(y)), ...]`."
        elif isinstance(value, (list, tuple)) and "inhomogeneous" in str(error):
            hint = (" Rows of several lengths are padded to one, by `trainer.utils.pad_sequences` or "
                    "`trainer.data.bucketed`.")
        raise DataError(f"{name()} of type {type(value).__name__} cannot become an array.{hint} NumPy says: "
                        f"{error}") from error


def _stacked(rows: list[np.ndarray]) -> np.ndarray:
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise DataError(f"All rows of an array must have one shape. Received: {len(rows)} images, or other rows, of "
                        f"{len(shapes)} shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}. Give images one "
                        "size and mode, as by `image.convert(\"RGB\").resize((width, height))`.")
    return np.stack(rows)


def unusable(name: str, array: np.ndarray, is_usable: bool = False, columns: str = "") -> DataError:
    """Returns the error for an array that no step can take: of no usable dtype, masked, or a scalar."""
    if not is_usable:
        table = columns and f", of a table with columns of other dtypes: {columns}"
        return DataError(f"{name} must be of a boolean or numeric dtype. Received: {describe(array)}{table}. Make "
                         "numbers of text by a layer of `trainer.data.preprocessing`, in `map` of a `Dataset`; of "
                         "dates by pandas' `dt.month` and the like; of objects by `.astype(\"float32\")`. Make rows "
                         "equally long and sparse matrices dense.")
    if array.ndim:
        return DataError(f"{name} must not be a masked array, whose mask would be lost. Received: {describe(array)}. "
                         "Pass its `filled(value)`, and a `sample_weight` of 0 for what does not count.")
    return DataError(f"{name} must have at least one dimension, the rows. Received: a scalar, {describe(array)}. "
                     "If the data yield rows, make batches of them, as `torch.utils.data.DataLoader` does.")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array whose memory JAX's CPU devices can use without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start:start + size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Returns whether JAX's CPU devices can use the array's memory without a copy."""
    return array.ctypes.data % _ALIGNMENT == 0


class BufferPool:
    """Allocates arrays, reusing the memory of deleted arrays.

    The system allocates new memory at the first touch, which takes longer than writing a batch. A CPU device may use
    the memory without a copy, but then JAX keeps a reference.

    Example:
      >>> pool = BufferPool()
      >>> first = pool.empty((2, 3), np.float32)
      >>> address = first.ctypes.data
      >>> del first
      >>> pool.empty((3, 2), np.int32).ctypes.data == address
      True
    """

    # Limit of free memory: about the amount in use by a reader. Not a global, because the last array may be deleted
    # after Python has cleared globals.
    kept_bytes = 128 * 2**20

    def __init__(self) -> None:
        # Deques, because any thread may drop the last reference to an array. The sum of their bytes need not be exact.
        self._free: collections.defaultdict[int, collections.deque[np.ndarray]] = collections.defaultdict(
            collections.deque)
        self._free_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns an uninitialized array, aligned for JAX's CPU devices."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            memory = self._free[size].pop()
            self._free_bytes -= size
        except IndexError:
            memory = aligned_empty((size,), np.dtype(np.uint8))
        # Views of the array refer to the lease and not to the memory, because the lease is not an array.
        return np.asarray(_Lease(memory, self)).view(dtype).reshape(shape)

    def give_back(self, memory: np.ndarray) -> None:
        """Takes back memory without references."""
        if self._free_bytes + memory.size > self.kept_bytes:  # most free sizes may be obsolete
            self._free.clear()
            self._free_bytes = 0
        if memory.size <= self.kept_bytes:
            self._free_bytes += memory.size
            self._free[memory.size].append(memory)


class _Lease:
    """Refers to memory, and gives it back when deleted."""

    def __init__(self, memory: np.ndarray, pool: BufferPool):
        self._memory = memory
        self._pool = pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


POOL = BufferPool()
"""The pool of all readers."""
