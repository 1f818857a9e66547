"""Arrays that stay on the devices between runs.

Owns their recognition, and their release together with the arrays they were made from. It must not know where the
devices are.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import weakref
import zlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from trainer.data.sources.arrays import HostArrays
from trainer.distribute.placement.device_memory import KeptArrays

KEPT = 2  # training and validation data of the last `fit`
_BLOCK_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Memory owned by the user, whose contents may have changed."""

    places: tuple[Any, ...]  # address, shape, strides and dtype of each array
    owners: tuple[weakref.ref[np.ndarray], ...] = dataclasses.field(compare=False)
    checksums: tuple[tuple[int | bytes, ...], ...]


class PlacedArrays(weakref.WeakKeyDictionary[HostArrays, tuple[_Memory, KeptArrays]]):
    """Arrays placed on devices, by the host arrays they were made from.

    They are recognized by their memory if its checksums are unchanged, which costs a fraction of placing them again.
    They are held as long as the host arrays, such as a `Dataset`'s; the last `KEPT`, until the memory is freed. Arrays
    that were released because others needed their memory are placed again.

    `arrays in placed` compares the object and not its memory, whose checksums take as long as sending the rows once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_memory: list[tuple[_Memory, KeptArrays]] = []  # most recently used last

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedArrays:
        return PlacedArrays()  # a copied strategy has placed nothing

    def get_or_place(
        self, arrays: HostArrays, place: Callable[[], Any], devices: Collection[jax.Device], nbytes: int
    ) -> Any:
        """Returns the placed arrays of `arrays`, or else the result of `place()`; see `KeptArrays.get_or_place`."""
        memory, known = self._memory_of(arrays), self.get(arrays)
        if known is None or known[0] != memory:
            self.pop(arrays, None)
            known = self[arrays] = memory, self._known(memory)
        return known[1].get_or_place(place, devices, nbytes)

    def are_stale(self, arrays: HostArrays) -> bool:
        """Returns whether arrays were placed for this object, and its memory has changed since."""
        known = self.get(arrays)
        return known is not None and known[0].checksums != checksums_of(arrays)

    def _known(self, memory: _Memory) -> KeptArrays:
        known = [pair for pair in self._by_memory if pair[0].places == memory.places]
        self._by_memory = [pair for pair in self._by_memory if pair not in known]
        if known and known[0][0] == memory:
            kept = known[0][1]
        else:
            known.clear()  # frees its device memory
            del self._by_memory[:1 - KEPT]
            kept = KeptArrays()
        self._by_memory.append((memory, kept))
        return kept

    def _memory_of(self, arrays: HostArrays) -> _Memory:
        leaves = jax.tree.leaves(arrays.tree)
        places = tuple((leaf.ctypes.data, leaf.shape, leaf.strides, leaf.dtype) for leaf in leaves)
        owners = tuple(weakref.ref(_owner(leaf), self._forget) for leaf in leaves)
        return _Memory((jax.tree.structure(arrays.tree), *places), owners, checksums_of(arrays))

    def _forget(self, owner: weakref.ref[np.ndarray]) -> None:
        self._by_memory = [pair for pair in self._by_memory if all(ref is not owner for ref in pair[0].owners)]


def checksums_of(arrays: HostArrays) -> tuple[tuple[int | bytes, ...], ...]:
    """Returns the checksums of each array in a tree."""
    return tuple(map(checksums, jax.tree.leaves(arrays.tree)))


def checksums(array: np.ndarray) -> tuple[int | bytes, ...]:
    """Returns the CRC-32 of each block of an array's rows, a few megabytes each, computed by several threads.

    An array of a single block is its own checksum: a copy takes a quarter of the time, which counts in short epochs.

    >>> checksums(np.zeros(3)) == checksums(np.array([0.0, 0.0, -0.0]))
    False
    """
    rows = max(1, _BLOCK_BYTES // max(1, array.nbytes // len(array)))
    blocks = [array[start:start + rows] for start in range(0, len(array), rows)]
    if len(blocks) == 1:
        return (array.tobytes(),)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(_checksum, blocks))


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _owner(array: np.ndarray) -> np.ndarray:
    """Returns the array with the lifetime of the memory; a view of it may end sooner."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
