"""Host memory that is used again and again, for batches on their way to the devices.

Owns when memory may be used again: once nothing refers to it any more. A CPU device may work on the memory itself and
not on a copy, but then JAX refers to it for as long. Memory that is new has to be made by the system at its first
touch, which takes longer than to write the batch.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np

from trainer.data.arrays import aligned_empty

_KEPT = 8  # free pieces of each size, more than a reader has on their way at once


class BufferPool:
    """Makes arrays, of the memory of earlier ones where these are gone.

    Example:
      >>> pool = BufferPool()
      >>> first = pool.empty((2, 3), np.float32)
      >>> address = first.ctypes.data
      >>> del first
      >>> pool.empty((3, 2), np.int32).ctypes.data == address
      True
    """

    def __init__(self) -> None:
        # A deque, as the last reference to an array may end in any thread.
        self._free: dict[int, collections.deque[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an uninitialised array, aligned as JAX's CPU devices like it."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, collections.deque(maxlen=_KEPT))
        try:
            memory = free.pop()
        except IndexError:
            memory = aligned_empty((size,), np.dtype(np.uint8))
        # All views of the array refer to the lease, and not past it to the memory, as it is no array itself.
        return np.asarray(_Lease(memory, free)).view(dtype).reshape(shape)


class _Lease:
    """Refers to memory and gives it back at its own end."""

    def __init__(self, memory: np.ndarray, free: collections.deque[np.ndarray]):
        self._memory = memory
        self._free = free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)
