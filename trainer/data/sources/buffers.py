"""Reused host memory for batches on their way to the devices.

Owns the reuse of memory, which is possible once nothing refers to it. A CPU device may use the memory without a copy,
but then JAX keeps a reference. The system allocates new memory at the first touch, which takes longer than writing the
batch, so memory is kept from one run to the next, up to a limit.
"""

from __future__ import annotations

import collections
import math

import numpy as np
from jax.typing import DTypeLike

from trainer.data.sources.arrays import aligned_empty


class BufferPool:
    """Allocates arrays, reusing the memory of deleted arrays.

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


POOL = BufferPool()
"""The pool of all readers."""


class _Lease:
    """Refers to memory, and gives it back when deleted."""

    def __init__(self, memory: np.ndarray, pool: BufferPool):
        self._memory = memory
        self._pool = pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._memory)
