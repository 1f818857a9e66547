"""Host memory that is used again and again, for batches on their way to the devices.

Owns when memory may be used again: once nothing refers to it any more. A CPU device may work on the memory itself and
not on a copy, but then JAX refers to it for as long. Memory that is new has to be made by the system at its first
touch, which takes longer than to write the batch. So it is kept from one run to the next, up to a limit.
"""

from __future__ import annotations

import collections
import math

import numpy as np
from jax.typing import DTypeLike

from trainer.data.sources.arrays import aligned_empty


class BufferPool:
    """Makes arrays, of the memory of earlier arrays where these are gone.

    Example:
      >>> pool = BufferPool()
      >>> first = pool.empty((2, 3), np.float32)
      >>> address = first.ctypes.data
      >>> del first
      >>> pool.empty((3, 2), np.int32).ctypes.data == address
      True
    """

    # Of free memory: about what a reader has on its way at once. No global, as the last array may end when Python has
    # cleared those.
    kept_bytes = 128 * 2**20

    def __init__(self) -> None:
        # Deques, as the last reference to an array may end in any thread. The sum of their bytes need not be exact.
        self._free: collections.defaultdict[int, collections.deque[np.ndarray]] = collections.defaultdict(
            collections.deque)
        self._free_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns an uninitialised array, aligned as JAX's CPU devices like it."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            memory = self._free[size].pop()
            self._free_bytes -= size
        except IndexError:
            memory = aligned_empty((size,), np.dtype(np.uint8))
        # All views of the array refer to the lease, and not past it to the memory, as it is no array itself.
        return np.asarray(_Lease(memory, self)).view(dtype).reshape(shape)

    def give_back(self, memory: np.ndarray) -> None:
        """Takes memory that nothing refers to any more."""
        if self._free_bytes + memory.size > self.kept_bytes:  # most of it may be of sizes that are no longer needed
            self._free.clear()
            self._free_bytes = 0
        if memory.size <= self.kept_bytes:
            self._free_bytes += memory.size
            self._free[memory.size].append(memory)


POOL = BufferPool()
"""That of all readers."""


class _Lease:
    """Refers to memory and gives it back at its own end."""

    def __init__(self, memory: np.ndarray, pool: BufferPool):
        self._memory = memory
        self._pool = pool
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._memory)
