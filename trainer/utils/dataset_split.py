"""Split of data into two parts, by rows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe
from trainer.core.types import ArrayTree
from trainer.data import Dataset
from trainer.data.sources.arrays import HostArrays, is_array_tree, is_leaf

_CHUNK_ROWS = 1024  # of an unbatched dataset, read at once


@explains_arguments
def split_dataset(
    dataset: ArrayTree | Dataset | Iterable[Any], left_size: float | None = None, right_size: float | None = None,
    shuffle: bool = False, seed: int | None = None,
) -> tuple[Dataset, Dataset]:
    """Splits data into two datasets, the first rows and the last rows, for example for training and testing.

    Args:
      dataset: an array, or a list, tuple or dict of arrays with equally many rows; a `trainer.data.Dataset` of rows or
        batches, which is read once; or an iterable of rows, such as a generator or a torch `Dataset`, which is read
        into memory.
      left_size: number or fraction of rows of the first dataset; by default the remainder of `right_size`.
      right_size: number or fraction of rows of the second dataset; by default the remainder of `left_size`.
      shuffle: whether to shuffle the rows first, in the same order as Keras.
      seed: seed of the order; by default drawn from Python's `random`.

    Returns:
      `(left, right)`, datasets of rows; datasets of batches of the same size if `dataset` has batches.

    Raises:
      TypeError: for sizes that are not numbers, or unsupported data.
      ValueError: without sizes; for sizes out of range, an empty part, or endless data.

    >>> left, right = split_dataset((np.arange(10), np.arange(10) * 2), left_size=0.8)
    >>> left, right, next(iter(right))
    (Dataset(8 rows), Dataset(2 rows), (np.int32(8), np.int32(16)))

    Source: https://keras.io/api/utils/python_utils/#split_dataset-function.
    """
    arguments.require_bool(shuffle=shuffle)
    if seed is not None:
        arguments.as_count("seed", seed, -2**63, "a whole number or None")
    _check_sizes(left_size, right_size)
    arrays, batch_size = _arrays_of(dataset)
    left_rows, right_rows = _sizes(left_size, right_size, arrays.rows)
    rows: Any = slice(None)
    if shuffle:
        rows = list(range(arrays.rows))
        random.Random(random.randint(0, int(1e6)) if seed is None else seed).shuffle(rows)
    parts = []
    for part in (slice(left_rows), slice(arrays.rows - right_rows, None)):
        chosen = rows[part] if shuffle else part
        tree = jax.tree.map(lambda array, chosen=chosen: array[chosen], arrays.tree)
        made = Dataset.from_host_arrays(HostArrays(tree))
        parts.append(made if batch_size is None else made.batch(batch_size))
    return parts[0], parts[1]


def _arrays_of(dataset: Any) -> tuple[HostArrays, int | None]:
    """Returns the rows of data as arrays, and the batch size if they were batched."""
    if isinstance(dataset, Dataset):
        if dataset.cardinality == math.inf:
            raise ValueError("`dataset` is endless. Call its `take` first, or split it before `repeat`.")
        batches = dataset if dataset.batch_size else dataset.batch(_CHUNK_ROWS)
        return HostArrays(_joined(list(batches), np.concatenate)), dataset.batch_size
    if is_array_tree(dataset):
        return HostArrays.of(dataset, text=True), None
    if hasattr(dataset, "element_spec"):
        raise TypeError("`dataset` must be arrays, a `trainer.data.Dataset`, or yield rows. Received: a "
                        "`tf.data.Dataset`. Split it by its own `take` and `skip`.")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, (str, bytes, dict)):
        rows = [dataset[index] for index in range(len(dataset))]
    elif hasattr(dataset, "__iter__") and not isinstance(dataset, (str, bytes, dict)):
        rows = list(dataset)
    else:
        raise TypeError("`dataset` must be an array, a list, tuple or dict of arrays, a `trainer.data.Dataset`, or "
                        f"yield rows. Received: {describe(dataset)}.")
    if not rows:
        raise ValueError("`dataset` is empty.")
    return HostArrays.of(_joined(rows, np.stack), text=True), None


def _joined(parts: list[Any], join: Any) -> Any:
    try:
        return jax.tree.map(lambda *leaves: join([np.asarray(leaf) for leaf in leaves]), *parts, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError("The rows of `dataset` must have one structure and one shape. Received: first "
                         f"{describe(parts[0])}. {error}") from error


def _check_sizes(left_size: Any, right_size: Any) -> None:
    sizes = {"left_size": left_size, "right_size": right_size}
    if left_size is None and right_size is None:
        raise ValueError("`left_size` or `right_size` must be given.")
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, (float, np.floating)):
            arguments.require({name: size}, "a share between 0 and 1, or a number of rows",
                              lambda share: 0 < share < 1)
        else:
            arguments.as_count(name, size, 1, "a number of rows of at least 1, or a share between 0 and 1")
    if all(isinstance(size, (float, np.floating)) for size in sizes.values()) and left_size + right_size > 1:
        raise ValueError("`left_size` and `right_size` must be shares of no more than all rows. Received: "
                         f"left_size={left_size}, right_size={right_size}.")


def _sizes(left_size: Any, right_size: Any, rows: int) -> tuple[int, int]:
    given = [round(size * rows) if isinstance(size, (float, np.floating)) else size
             for size in (left_size, right_size)]
    left, right = (rows - other if own is None else int(own)
                   for own, other in zip(given, reversed(given), strict=True))
    if left < 1 or right < 1 or left + right > rows:
        raise ValueError(f"`left_size` and `right_size` must leave each part at least one of the {rows} rows, and "
                         f"share none. Received: left_size={left_size}, right_size={right_size}, which are {left} and "
                         f"{right} rows.")
    return left, right
