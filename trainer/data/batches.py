"""What a batch is: its packing as (x, y, sample_weight), its structure, and stacks of several.

Owns the form of the data that flows from sources to steps. It must not know where batches come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trainer.data.arrays import DataError, as_arrays, canonical_dtype, check_rows, leaf_names
from trainer.data.buffers import BufferPool
from trainer.errors import describe

Batch = Any
"""A tree of numpy arrays with equal first dimensions, the rows: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""


def unpack_x_y_sample_weight(batch: Batch) -> tuple[Any, Any, Any]:
    """Returns `(x, y, sample_weight)` of a batch, None for what it lacks.

    Args:
      batch: `x` alone (an array or a dict), or a tuple or list of one to three parts.

    Raises:
      ValueError: a tuple with another number of parts.

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


def pack_x_y_sample_weight(x: Any, y: Any = None, sample_weight: Any = None) -> Batch:
    """Returns a batch of the given parts: the inverse of `unpack_x_y_sample_weight`.

    Returns:
      `x` itself when nothing else is given and it is not a tuple or list; otherwise `(x,)`, `(x, y)` or
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


def as_batch(element: Any) -> Batch:
    """Returns what a user's pipeline yielded as a batch of numpy arrays in canonical dtypes.

    Arrays that need no conversion are not copied, so the batch may share memory with the pipeline's.

    Raises:
      DataError: a leaf cannot be used, the rows differ between leaves, or there are none.
    """
    batch = jax.tree.map(lambda leaf: leaf.astype(canonical_dtype(leaf.dtype), copy=False), as_arrays(element))
    check_rows(batch)
    return batch


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a batch that this process has, where each of several has some: those of the first one come first.

    Attributes:
      data: these rows; there may be none.
      counts: how many rows of the batch each process has.
      whole: returns all rows of the batch. May ask the other processes for theirs: all of them must call it, in their
        main threads.
    """

    data: Batch
    counts: tuple[int, ...]
    whole: Callable[[], Batch]


def rows_here(batch: Batch | Part) -> Batch:
    """Returns the rows of a batch that this process has read."""
    return batch.data if isinstance(batch, Part) else batch


def all_rows(batch: Batch | Part) -> Batch:
    """Returns all rows of a batch; see `Part.whole`."""
    return batch.whole() if isinstance(batch, Part) else batch


def map_batch(function: Callable[[Batch], Batch], batch: Batch | Part) -> Batch | Part:
    """Returns what `function`, which looks at each row on its own, makes of a batch."""
    if isinstance(batch, Part):
        return Part(function(batch.data), batch.counts, lambda: function(batch.whole()))
    return function(batch)


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The structure, shapes and dtypes of a run's first batch, which later ones must match.

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

    def is_kept_by(self, element: Any) -> bool:
        """Returns whether an element is a batch of this structure and dtypes, and these shapes except for the rows."""
        leaves, structure = jax.tree.flatten(element)
        if structure != self.structure or type(leaves[0]) is not np.ndarray or not leaves[0].ndim or not len(leaves[0]):
            return False
        rows = len(leaves[0])
        # Subclasses, such as masked arrays, are for `as_batch` to look at.
        return all(type(leaf) is np.ndarray and leaf.dtype == dtype and leaf.shape == (rows, *shape[1:])
                   for leaf, shape, dtype in zip(leaves, self.shapes, self.dtypes, strict=True))

    def check(self, batch: Batch) -> None:
        """Raises DataError unless `batch` has this structure, these shapes except for the rows, and these kinds."""
        leaves, structure = jax.tree.flatten(batch)
        if structure != self.structure:
            raise DataError(f"its structure is not that of the first batch. Received: {describe(batch)}. "
                            f"Expected: {self.structure}.")
        for position, (leaf, shape, dtype) in enumerate(zip(leaves, self.shapes, self.dtypes, strict=True)):
            if leaf.shape[1:] != shape[1:] or leaf.dtype.kind != dtype.kind:
                raise DataError(f"`{leaf_names(batch)[position]}` is not like that of the first batch. "
                                f"Received: shape {leaf.shape} and dtype {leaf.dtype}. "
                                f"Expected: shape {shape} and dtype {dtype}; only the first dimension may differ.")


class BatchConverter:
    """Turns the elements of a pipeline into batches, quickly for those that are like the one before.

    What a slow pipeline does next waits for this, so every microsecond counts.
    """

    def __init__(self) -> None:
        self._spec: BatchSpec | None = None

    def __call__(self, element: Any) -> Batch:
        """Returns what `as_batch` returns, and raises what it raises."""
        if self._spec is not None and self._spec.is_kept_by(element):
            return element
        batch = as_batch(element)
        self._spec = BatchSpec.of(batch)
        return batch


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in an epoch.

    Attributes:
      batch: the number in the epoch of the batch that comes next.
      source_state: where the source stands (see `Source.state`).
    """

    batch: int
    source_state: Any


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive batches of equally many rows, stacked.

    Attributes:
      data: the tree of a batch, with leaves of shape `(room, rows, ...)` that share no memory with the user's arrays,
        where several processes have some rows each those of this one; or, where it was asked for, the numbers of the
        rows, int32 of shape `(room, rows)`. What comes after the first `count` batches is undefined: the room is there
        so that groups of any count have one shape.
      count: how many batches.
      rows: how many rows each has.
      first: the number of the first batch in its epoch, from 0.
      mark: a place at the first batch or before it from which the epoch can be continued, if that was asked for.
      counts: how many rows of each batch each process has, as in `Part`; None if this one has all of them.
    """

    data: Any
    count: int
    rows: int
    first: int
    mark: Mark | None = None
    counts: tuple[int, ...] | None = None


class GroupBuffer:
    """Stacks batches as they come, each copied at once, because a pipeline may write the next one into its memory.

    Args:
      capacity: how many batches fit.
      pool: where the memory comes from.
    """

    def __init__(self, capacity: int, pool: BufferPool | None = None):
        self.count = 0
        self._capacity = capacity
        self._pool = pool or BufferPool()
        self._buffers: list[np.ndarray] = []
        self._structure: jax.tree_util.PyTreeDef | None = None
        self._counts: tuple[int, ...] | None = None
        self._first = 0

    @property
    def is_full(self) -> bool:
        """Whether no further batch fits."""
        return self.count == self._capacity

    def fits(self, batch: Batch | Part) -> bool:
        """Returns whether `batch`, of the same structure, has the shapes and dtypes of those already here."""
        if self.count == 0:
            return True
        if (batch.counts if isinstance(batch, Part) else None) != self._counts:
            return False
        pairs = zip(jax.tree.leaves(rows_here(batch)), self._buffers, strict=True)
        return all(leaf.shape == buffer.shape[1:] and leaf.dtype == buffer.dtype for leaf, buffer in pairs)

    def add(self, batch: Batch | Part, number: int) -> None:
        """Copies `batch`, the epoch's batch `number`, to the end."""
        leaves, structure = jax.tree.flatten(rows_here(batch))
        if self.count == 0:
            self._counts = batch.counts if isinstance(batch, Part) else None
            self._structure = structure
            self._buffers = [self._pool.empty((self._capacity, *leaf.shape), leaf.dtype) for leaf in leaves]
            self._first = number
        for leaf, buffer in zip(leaves, self._buffers, strict=True):
            buffer[self.count] = leaf
        self.count += 1

    def take(self, mark: Mark | None = None) -> Group:
        """Returns the batches so far, at least one, and empties the buffer, which keeps no reference to them."""
        rows = self._buffers[0].shape[1] if self._counts is None else sum(self._counts)
        group = Group(
            jax.tree.unflatten(self._structure, self._buffers), self.count, rows, self._first, mark, self._counts)
        self.count, self._buffers = 0, []
        return group
