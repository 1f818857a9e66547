"""Batches of sequences of several lengths: rows of similar lengths, padded to few lengths.

Owns the public `bucketed`: the buckets, the order of a pass, and the padding of a batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import numpy as np

from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import describe
from trainer.core.foreign_names import ForeignNames
from trainer.data.sources import foreign_names
from trainer.data.sources.arrays import (
    Batch,
    DataError,
    as_batch,
    column_array,
    leaf_names,
    pack_x_y_sample_weight,
    unpack_x_y_sample_weight,
)
from trainer.data.sources.dataset import SeekingSource, generator_of_pass

_SAMPLE_WEIGHT = "sample_weight"


@explains_arguments
def bucketed(
    data: Any, bucket_boundaries: Sequence[int], bucket_batch_sizes: int | Sequence[int] | None = None, *,
    max_tokens: int | None = None, padding_values: Any = 0, mask: str | None = _SAMPLE_WEIGHT,
    drop_remainder: bool = False, shuffle: bool = True, seed: int = 0,
) -> BucketedDataset:
    """Returns batches of sequences of similar lengths, padded at their ends to the boundary of their bucket.

    Each pass has a new order, which depends only on the seed and the pass: batches are the same on any number of
    devices, and a run resumes without making earlier batches. A model compiles for each boundary.

    Args:
      data: the columns: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each a column or a dict of columns. A column
        is a list with an item per row, or an array with rows first. The first list of sequences (arrays or lists of
        shape `(length, ...)`) sets the lengths of the rows. Lists with these lengths are padded; in each other column,
        all rows have the same shape.
      bucket_boundaries: the lengths of batches, increasing. A row is padded to the first boundary of at least its
        length.
      bucket_batch_sizes: the number of rows per batch, for each boundary or for all.
      max_tokens: instead of `bucket_batch_sizes`, the maximum of rows times length of a batch.
      padding_values: a number to pad with, or such numbers in the structure of `data`.
      mask: "sample_weight" weights each position of padded targets: 0 for padding, else 1 or the row's weight. Another
        name adds a boolean input of this name, of shape `(rows, length)`, to a dict of inputs: False for padding. None
        adds nothing.
      drop_remainder: whether to drop the last batch of a bucket if it has fewer rows.
      shuffle: whether to shuffle rows and batches. Otherwise a batch follows as soon as its bucket is full, as in
        `tf.data`.
      seed: seed of the order.

    Returns:
      An iterable of batches for `fit`, `evaluate` and `predict`; iteration yields pass 0.

    Raises:
      ValueError: if a row is longer than the last boundary, padding does not fit into a column's dtype, or columns or
        arguments contradict each other.
      TypeError: if an argument is of another type.

    Example:
      >>> tokens = [[1, 2], [3, 4, 5], [6]]
      >>> batches = bucketed((tokens, tokens), [2, 4], 2, shuffle=False)
      >>> batches
      BucketedDataset(2 batches of lengths 2 to 4)
      >>> [(x.tolist(), weight.tolist()) for x, y, weight in batches]
      [([[1, 2], [6, 0]], [[1.0, 1.0], [1.0, 0.0]]), ([[3, 4, 5, 0]], [[1.0, 1.0, 1.0, 0.0]])]

    Source: argument names of `tf.data.Dataset.bucket_by_sequence_length`, where a boundary is the first length of the
    next bucket, and rows beyond the last boundary have another bucket; `max_tokens` as in fairseq.
    """
    arguments.require_bool(drop_remainder=drop_remainder, shuffle=shuffle)
    seed = arguments.as_count("seed", seed, 0)
    if not isinstance(bucket_boundaries, (list, tuple, np.ndarray)) or not len(bucket_boundaries):
        raise ValueError(f"`bucket_boundaries` must be a list of lengths. Received: {describe(bucket_boundaries)}.")
    boundaries = tuple(arguments.as_count("bucket_boundaries", length) for length in bucket_boundaries)
    if any(second <= first for first, second in itertools.pairwise(boundaries)):
        raise ValueError(f"`bucket_boundaries` must increase. Received: {list(boundaries)}.")
    sizes = _batch_sizes(boundaries, bucket_batch_sizes, max_tokens)
    if isinstance(data, list):
        data = (data,)
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    parts = tuple(part for part in (x, y, sample_weight) if part is not None)
    names, (leaves, structure) = leaf_names(_placeholders(parts)), jax.tree.flatten(parts, is_leaf=_is_column)
    columns = [_listed(leaf) for leaf in leaves]
    lengths = _lengths_of(names, columns)
    if mask not in (None, _SAMPLE_WEIGHT) and (not isinstance(x, Mapping) or mask in x):
        raise ValueError(f"`mask={mask!r}` is the name of a further input, so `x` must be a dict of inputs without it. "
                         f"Received: a {type(x).__name__}{list(x) if isinstance(x, Mapping) else ''}.")
    if int(lengths.max()) > boundaries[-1]:
        row = int(np.argmax(lengths > boundaries[-1]))
        raise ValueError(f"Row {row} has the length {lengths[row]}, and the last of `bucket_boundaries` is "
                         f"{boundaries[-1]}. Add a boundary, or cut or drop longer rows.")
    made = tuple(_column_of(name, column, lengths) for name, column in zip(names, columns, strict=True))
    values = _padding_of(padding_values, structure)
    _check_padding(names, made, values)
    of_y, of_weights = (jax.tree.map(lambda column: 0, tree, is_leaf=_is_column) for tree in (y, sample_weight))
    if sample_weight is not None and mask == _SAMPLE_WEIGHT and of_y != of_weights:
        raise ValueError("`sample_weight` must have the structure of `y`, a column of weights for each column of it. "
                         f"Received: {describe(_placeholders(sample_weight))} and {describe(_placeholders(y))}.")
    dataset = BucketedDataset(boundaries, sizes, jax.tree.unflatten(structure, made), values, lengths, mask,
                              drop_remainder, seed if shuffle else None)
    if not len(dataset):
        raise ValueError("`drop_remainder=True` leaves no batch: no bucket has as many rows as its batches.")
    return dataset


@dataclasses.dataclass(frozen=True, eq=False)
class _Sequences:
    """A column of sequences: all items joined, and the starts of the items and their end."""

    joined: np.ndarray
    starts: np.ndarray

    def rows(self, numbers: np.ndarray, length: int, padding: Any) -> np.ndarray:
        batch = np.full((len(numbers), length, *self.joined.shape[1:]), padding, self.joined.dtype)
        for row, number in zip(batch, numbers, strict=True):
            item = self.joined[self.starts[number]:self.starts[number + 1]]
            row[:len(item)] = item
        return batch


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BucketedDataset(ForeignNames):
    """Batches of sequences, as made by `bucketed`.

    Attributes:
      bucket_boundaries: the length of each bucket.
      bucket_batch_sizes: number of rows per batch, for each bucket.
    """

    bucket_boundaries: tuple[int, ...]
    bucket_batch_sizes: tuple[int, ...]
    _columns: Any
    _padding: tuple[Any, ...]
    _lengths: np.ndarray
    _mask: str | None
    _drop_remainder: bool
    _seed: int | None

    _foreign_names = foreign_names.METHODS

    def __len__(self) -> int:
        return sum(len(batches) for batches in self._batches_of_buckets(np.arange(len(self._lengths))))

    def __iter__(self) -> Iterator[Any]:
        return self.read(0)

    def __repr__(self) -> str:
        first, last = self.bucket_boundaries[0], self.bucket_boundaries[-1]
        return f"BucketedDataset({len(self)} batches of lengths {first} to {last})"

    @property
    def rows(self) -> int:
        """Number of rows of a pass."""
        return sum(map(len, itertools.chain(*self._batches_of_buckets(np.arange(len(self._lengths))))))

    @property
    def num_shapes(self) -> int:
        """Number of different shapes of batches."""
        return sum(len(set(map(len, batches))) for batches in self._batches_of_buckets(np.arange(len(self._lengths))))

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        """Yields the batches of a pass, without the first `start` batches, which are not made."""
        for numbers in self._order(pass_index)[start:]:
            yield self._batch(numbers)

    def _order(self, pass_index: int) -> list[np.ndarray]:
        order = np.arange(len(self._lengths))
        if self._seed is None:
            batches = list(itertools.chain(*self._batches_of_buckets(order)))
            full = self._sizes_of_rows()
            return sorted(batches, key=lambda numbers: (len(numbers) < full[numbers[0]], numbers[-1]))
        generator = generator_of_pass(self._seed, pass_index)
        generator.shuffle(order)
        batches = list(itertools.chain(*self._batches_of_buckets(order)))
        return [batches[number] for number in generator.permutation(len(batches))]

    def _batches_of_buckets(self, order: np.ndarray) -> list[list[np.ndarray]]:
        """Returns the rows of each batch of each bucket, for rows in an order."""
        buckets, found = self._buckets[order], []
        for bucket, size in enumerate(self.bucket_batch_sizes):
            rows = order[buckets == bucket]
            stop = len(rows) - (len(rows) % size if self._drop_remainder else 0)
            found.append([rows[start:start + size] for start in range(0, stop, size)])
        return found

    @property
    def _buckets(self) -> np.ndarray:
        return np.searchsorted(self.bucket_boundaries, self._lengths)

    def _sizes_of_rows(self) -> np.ndarray:
        return np.asarray(self.bucket_batch_sizes)[self._buckets]

    def _batch(self, numbers: np.ndarray) -> Batch:
        length = self.bucket_boundaries[np.searchsorted(self.bucket_boundaries, self._lengths[numbers[0]])]
        columns, structure = jax.tree.flatten(self._columns, is_leaf=_is_made)
        leaves = [column.rows(numbers, length, padding) if isinstance(column, _Sequences) else column[numbers]
                  for column, padding in zip(columns, self._padding, strict=True)]
        x, y, sample_weight = unpack_x_y_sample_weight(jax.tree.unflatten(structure, leaves))
        is_real = np.arange(length) < self._lengths[numbers][:, None]
        if self._mask == _SAMPLE_WEIGHT and y is not None:
            sample_weight = self._weights(is_real, sample_weight)
        elif self._mask not in (None, _SAMPLE_WEIGHT):
            x = {**x, self._mask: is_real}
        return as_batch(pack_x_y_sample_weight(x, y, sample_weight))

    def _weights(self, is_real: np.ndarray, given: Any) -> Any:
        """Returns the weights of targets: by place for sequences, else the given weights."""
        targets, structure = jax.tree.flatten(self._columns[1], is_leaf=_is_made)
        weights = [None] * len(targets) if given is None else jax.tree.leaves(given)
        if not any(isinstance(target, _Sequences) for target in targets):
            return given
        made = []
        for target, weight in zip(targets, weights, strict=True):
            if isinstance(target, _Sequences):
                places = is_real.astype(np.float32)
                made.append(places if weight is None else (
                    places * (weight if weight.ndim > 1 else weight[:, None]).astype(np.float32)))
            else:
                made.append(np.ones(len(is_real), np.float32) if weight is None else weight)
        return jax.tree.unflatten(structure, made)


class BucketSource(SeekingSource):
    """Batches of a `BucketedDataset`, from any position without making earlier batches."""

    is_exact = True

    def __init__(self, dataset: BucketedDataset):
        self._dataset = dataset
        self.num_batches, self.rows, self.num_shapes = len(dataset), dataset.rows, dataset.num_shapes

    def read(self, pass_index: int, start: int = 0) -> Generator[Any, None, None]:
        return self._dataset.read(pass_index, start)


def _batch_sizes(
    boundaries: tuple[int, ...], sizes: int | Sequence[int] | None, max_tokens: int | None
) -> tuple[int, ...]:
    if (sizes is None) == (max_tokens is None):
        raise ValueError("Say how many rows a batch has, either by `bucket_batch_sizes` or by `max_tokens`.")
    if max_tokens is not None:
        max_tokens = arguments.as_count("max_tokens", max_tokens)
        if max_tokens < boundaries[-1]:
            raise ValueError(f"`max_tokens` is less than the last of `bucket_boundaries`, {boundaries[-1]}, so a row "
                             f"of this length has no room. Received: {max_tokens}.")
        return tuple(max_tokens // length for length in boundaries)
    if not isinstance(sizes, (list, tuple, np.ndarray)):
        return (arguments.as_count("bucket_batch_sizes", sizes),) * len(boundaries)
    if len(sizes) != len(boundaries):
        raise ValueError(f"`bucket_batch_sizes` must be a number, or a number for each of the {len(boundaries)} "
                         f"`bucket_boundaries`. Received: {len(sizes)}.")
    return tuple(arguments.as_count("bucket_batch_sizes", size) for size in sizes)


def _is_column(value: object) -> bool:
    return value is not None and not isinstance(value, (tuple, dict))


def _listed(column: Any) -> Any:
    """Returns sequences of Hugging Face's columns, and of arrays of objects, as a list."""
    is_of_objects = getattr(getattr(column, "dtype", None), "kind", None) == "O"
    return list(column) if is_of_objects or (isinstance(column, Sequence) and not isinstance(column, str)) else column


def _is_made(value: object) -> bool:
    return isinstance(value, (_Sequences, np.ndarray))


def _placeholders(tree: Any) -> Any:
    return jax.tree.map(lambda column: 0, tree, is_leaf=_is_column)


def _lengths_of(names: Sequence[str], columns: Sequence[Any]) -> np.ndarray:
    for name, column in zip(names, columns, strict=True):
        if not (isinstance(column, list) or (hasattr(column, "shape") and column.shape)):
            raise TypeError(f"`{name}` of `data` must be a list or an array with an item per row. Received: "
                            f"{describe(column)}.")
    counts = [len(column) for column in columns]
    if len(set(counts)) != 1 or 0 in counts:
        shown = ", ".join(f"{name}: {count}" for name, count in list(zip(names, counts, strict=True))[:8])
        raise ValueError("The columns of `data` must have equally many rows, and some. Received: "
                         f"{shown}{', ...' if len(counts) > 8 else ''}. A column is a list or an array: a tuple is "
                         "several columns.")
    for name, column in zip(names, columns, strict=True):
        if isinstance(column, list) and np.ndim(column[0]):
            odd = next((row for row, item in enumerate(column) if not hasattr(item, "__len__")), None)
            if odd is not None:
                raise TypeError(f"Each item of `{name}` must be a sequence, as the first is. Received: "
                                f"{describe(column[odd])} for row {odd}.")
            return np.array([len(item) for item in column])
    raise ValueError("`data` has no column of sequences: a list with an array or a list for each row. Arrays have rows "
                     "of one length: pass them to `fit`. Of a table, pass its columns.")


def _column_of(name: str, column: Any, lengths: np.ndarray) -> _Sequences | np.ndarray:
    try:
        if not isinstance(column, list) or not np.ndim(column[0]):
            return column_array(column)
        items = [np.asarray(item) for item in column]
        if any(len(item) != length for item, length in zip(items, lengths, strict=True)):
            if len({item.shape for item in items}) == 1:
                return np.stack(items)
            row = next(row for row, item in enumerate(items) if len(item) != lengths[row])
            raise DataError(f"row {row} has the length {len(items[row])}, and in the first column of sequences the "
                            f"length {lengths[row]}")
        filled = [item for item in items if len(item)]  # an empty list has no dtype of its own
        return _Sequences(np.concatenate(filled or items), np.concatenate([[0], np.cumsum(lengths)]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"`{name}` of `data` is no column of sequences or of rows of one shape: {error}.") from error


def _check_padding(names: Sequence[str], columns: Sequence[Any], values: Sequence[Any]) -> None:
    """Checks that columns of sequences can hold their padding."""
    for name, column, value in zip(names, columns, values, strict=True):
        if not isinstance(column, _Sequences):
            continue
        dtype = column.joined.dtype
        is_number = isinstance(value, (Real, np.bool_))
        if not is_number:
            raise TypeError("`padding_values` must be a number, or numbers in the structure of `data`. Received: "
                            f"{describe(value)} for `{name}`.")
        if dtype.kind in "iu" and not (
                float(value).is_integer() and np.iinfo(dtype).min <= int(value) <= np.iinfo(dtype).max):
            raise ValueError(f"`padding_values` must fit into the dtype of `{name}`, {dtype}. Received: {value!r}. "
                             "Give a number for each column, in the structure of `data`, or cast the sequences.")


def _padding_of(values: Any, structure: jax.tree_util.PyTreeDef) -> tuple[Any, ...]:
    if np.ndim(values) == 0 and not isinstance(values, (dict, tuple, list)):
        return (values,) * structure.num_leaves
    values = (values,) if isinstance(values, dict) else tuple(values)
    if jax.tree.structure(values) != structure:
        raise ValueError("`padding_values` must be a number, or numbers in the structure of `data`. Received: "
                         f"{describe(values)}.")
    return tuple(jax.tree.leaves(values))
