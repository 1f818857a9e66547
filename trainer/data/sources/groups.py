"""Batches as sources yield them, and groups: stacks of batches of the same shapes.

Owns the form of the data between sources and steps. It must not know the origin of batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from trainer.core.errors import describe
from trainer.core.types import PyTree
from trainer.data.sources.arrays import POOL, Batch, DataError, as_batch, leaf_names

_DIGESTED = 4096  # numbers of an array


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """This process's rows of a batch whose rows are spread over several processes, in the order of the processes.

    Attributes:
      data: the rows; possibly none.
      counts: the number of rows of each process.
      whole: returns all rows of the batch. It may fetch them from the other processes: all must call it, in their main
        threads.
    """

    data: Batch
    counts: tuple[int, ...]
    whole: Callable[[], Batch]


def rows_here(batch: Batch | LocalRows) -> Batch:
    """Returns this process's rows of a batch."""
    return batch.data if isinstance(batch, LocalRows) else batch


def all_rows(batch: Batch | LocalRows) -> Batch:
    """Returns all rows of a batch; see `LocalRows.whole`."""
    return batch.whole() if isinstance(batch, LocalRows) else batch


def map_batch(function: Callable[[Batch], Batch], batch: Batch | LocalRows) -> Batch | LocalRows:
    """Returns the result of a row-wise function for a batch."""
    if isinstance(batch, LocalRows):
        return LocalRows(function(batch.data), batch.counts, lambda: function(batch.whole()))
    return function(batch)


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The structure, shapes and dtypes of a run's first batch, with which later batches are compared.

    Attributes:
      structure: the tree.
      shapes: the shape of each leaf, rows included.
      dtypes: the dtype of each leaf.
    """

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, batch: Batch) -> BatchSpec:
        """Returns the spec that `batch` defines."""
        leaves, structure = jax.tree.flatten(batch)
        return cls(structure, tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves))

    @functools.cached_property
    def _is_tuple(self) -> bool:
        return self.structure == jax.tree.structure((0,) * len(self.shapes))

    def leaves_of(self, element: PyTree) -> Sequence[np.ndarray] | None:
        """Returns the leaves of an element with this structure, these shapes and dtypes; None for any other.

        A slow pipeline waits for this call, with cold caches, so every microsecond counts.
        """
        if type(element) is tuple and self._is_tuple and len(element) == len(self.shapes):
            leaves: Sequence[Any] = element  # checked below
        else:
            try:
                leaves, structure = jax.tree.flatten(element)
            except (TypeError, ValueError):  # keys that cannot be sorted, which `as_batch` reports
                return None
            if structure != self.structure:
                return None
        for index, leaf in enumerate(leaves):
            # `as_batch` handles subclasses, such as masked arrays.
            if type(leaf) is not np.ndarray or leaf.shape != self.shapes[index] or leaf.dtype != self.dtypes[index]:
                return None
        return leaves

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def check(self, batch: Batch, sizes_may_differ: bool = False) -> None:
        """Raises DataError if the structure, the shapes except for the rows, or the kinds of the dtypes differ.

        Args:
          batch: the batch.
          sizes_may_differ: whether the numbers of dimensions are compared, and not the dimensions.
        """
        leaves, structure = jax.tree.flatten(batch)
        if structure != self.structure:
            raise DataError(f"its structure differs from the first batch. Received: {describe(batch)}. "
                            f"Expected: {self.structure}.")
        for position, (leaf, shape, dtype) in enumerate(zip(leaves, self.shapes, self.dtypes, strict=True)):
            is_alike = leaf.ndim == len(shape) if sizes_may_differ else leaf.shape[1:] == shape[1:]
            if not is_alike or leaf.dtype.kind != dtype.kind:
                differing = "the sizes of its dimensions" if sizes_may_differ else "only the first dimension"
                raise DataError(f"`{leaf_names(batch)[position]}` differs from the first batch. "
                                f"Received: shape {leaf.shape} and dtype {leaf.dtype}. "
                                f"Expected: shape {shape} and dtype {dtype}; {differing} may differ.")


class BatchConverter:
    """Converts elements of a pipeline to batches, with a fast path for elements that are like the previous."""

    def __init__(self) -> None:
        self._spec: BatchSpec | None = None

    def __call__(self, element: PyTree) -> Batch | LocalRows:
        """Returns the result of `as_batch`, or raises its errors; `LocalRows` are returned unchanged."""
        if isinstance(element, LocalRows):
            return element
        if self._spec is not None and self._spec.leaves_of(element) is not None:
            return element
        batch = as_batch(element)
        self._spec = BatchSpec.of(batch)
        return batch


def digest_of(batch: Batch) -> str:
    """Returns a digest of the types, the shapes and some thousand numbers of each array: microseconds for any size."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        digest.update(f"{leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.ravel()[::leaf.size // _DIGESTED | 1].tobytes())  # odd steps see all columns of most arrays
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class ResumeToken:
    """A position in an epoch.

    Attributes:
      batch: the index of the next batch in the epoch; less than 0 in an earlier epoch of the same pass.
      source_state: the state of the source (see `Source.state`).
      digest: a digest of the next batch, to check a restored source by; None if unknown.
    """

    batch: int
    source_state: Any
    digest: str | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive batches of the same shapes, stacked.

    Attributes:
      data: the tree of a batch, with leaves of shape `(capacity, rows, ...)` that share no memory with the user's
        arrays; with several processes, this process's rows only; or, on request, row indices, int32 of shape
        `(capacity, rows)`. Entries after the first `count` batches are undefined: the capacity gives groups of any
        count the same shape.
      count: number of batches.
      rows: number of rows of each batch.
      first: index of the first batch in its epoch, from 0.
      resume_token: on request, a position at the first batch or before it, from which the epoch can continue.
      counts: the number of rows of each process per batch, as in `LocalRows`; None if this process has all rows.
    """

    data: Any
    count: int
    rows: int
    first: int
    resume_token: ResumeToken | None = None
    counts: tuple[int, ...] | None = None


class GroupBuffer:
    """Stacks batches. Each is copied at once, because a pipeline may overwrite its memory with the next batch.

    Args:
      capacity: maximum number of batches; may be assigned while the buffer is empty.
    """

    def __init__(self, capacity: int):
        self.count = 0
        self.capacity = capacity
        self._slots: list[np.ndarray] = []  # for each leaf, the stack of batches
        self._spec: BatchSpec | None = None
        self._counts: tuple[int, ...] | None = None
        self._first = 0

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full."""
        return self.count == self.capacity

    def add_if_alike(self, batch: PyTree) -> bool:
        """Appends a copy of a batch that matches the batches here; returns False for any other, or if empty or full."""
        if self.count == 0 or self.is_full or (batch.counts if isinstance(batch, LocalRows) else None) != self._counts:
            return False
        assert self._spec is not None, "there is a batch"
        leaves = self._spec.leaves_of(rows_here(batch))
        if leaves is None:
            return False
        self._append(leaves)
        return True

    def begin(self, batch: Batch | LocalRows, number: int) -> None:
        """Copies `batch`, with the index `number` in the epoch, to the empty buffer."""
        assert self.count == 0, "there are batches already"
        leaves = jax.tree.leaves(rows_here(batch))
        self._spec = BatchSpec.of(rows_here(batch))
        self._counts = batch.counts if isinstance(batch, LocalRows) else None
        self._slots = [POOL.empty((self.capacity, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._first = number
        self._append(leaves)

    def take(self, resume_token: ResumeToken | None = None) -> Group:
        """Returns the batches so far, at least one batch, and empties the buffer, which keeps no reference to them."""
        assert self._spec is not None, "there is a batch"
        rows = self._slots[0].shape[1] if self._counts is None else sum(self._counts)
        data = jax.tree.unflatten(self._spec.structure, self._slots)
        group = Group(data, self.count, rows, self._first, resume_token, self._counts)
        self.count, self._slots = 0, []
        return group

    def _append(self, leaves: Sequence[np.ndarray]) -> None:
        for leaf, slots in zip(leaves, self._slots, strict=True):
            slots[self.count] = leaf
        self.count += 1
