"""Arrays that stay on the devices from one run to the next.

Owns how they are recognised, and that they are let go with what they were made from. It must not know where the devices
are.
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

from trainer.data.sources.host_arrays import HostArrays
from trainer.distribute.placement.device_memory import KeptArrays

KEPT = 2  # those of the last `fit`: to train and to validate on
_BLOCK_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Memory of the user's, in which something else may stand by now."""

    places: tuple[Any, ...]  # address, shape, strides and dtype of each array
    owners: tuple[weakref.ref[np.ndarray], ...] = dataclasses.field(compare=False)
    checksums: tuple[tuple[int, ...], ...]


class PlacedArrays:
    """What was placed, by the arrays that it was made from.

    A `Dataset`'s arrays are known again by their identity, as nothing writes to them. Others are known by their memory,
    if their checksums are still what they were: to read them costs a fraction of placing them again. Of these the last
    `KEPT` are held, until the memory is freed. What was let go of, as other arrays needed its place, is placed again.
    """

    def __init__(self) -> None:
        self._by_identity: weakref.WeakKeyDictionary[HostArrays, KeptArrays] = weakref.WeakKeyDictionary()
        self._by_memory: list[tuple[_Memory, KeptArrays]] = []  # the last one was used last

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedArrays:
        return PlacedArrays()  # of a strategy of its own, which has placed nothing

    def __contains__(self, arrays: HostArrays) -> bool:
        """Returns whether something was placed for this object.

        Its memory is not looked for: the checksums take as long as to send the rows once, to the same program.
        """
        return arrays in self._by_identity

    def get_or_place(
        self, arrays: HostArrays, place: Callable[[], Any], devices: Collection[jax.Device], nbytes: int
    ) -> Any:
        """Returns what was placed for these arrays, or what `place()` returns; see `KeptArrays.get_or_place`."""
        kept = self._by_identity.get(arrays)
        if kept is None:
            kept = self._by_identity[arrays] = self._known(self._memory_of(arrays))
        return kept.get_or_place(place, devices, nbytes)

    def _known(self, memory: _Memory) -> KeptArrays:
        known = [pair for pair in self._by_memory if pair[0].places == memory.places]
        self._by_memory = [pair for pair in self._by_memory if pair not in known]
        if known and known[0][0] == memory:
            kept = known[0][1]
        else:
            known.clear()  # its memory on the devices is needed
            del self._by_memory[:1 - KEPT]
            kept = KeptArrays()
        self._by_memory.append((memory, kept))
        return kept

    def _memory_of(self, arrays: HostArrays) -> _Memory:
        leaves = jax.tree.leaves(arrays.tree)
        places = tuple((leaf.ctypes.data, leaf.shape, leaf.strides, leaf.dtype) for leaf in leaves)
        owners = tuple(weakref.ref(_owner(leaf), self._forget) for leaf in leaves)
        return _Memory((jax.tree.structure(arrays.tree), *places), owners, tuple(map(checksums, leaves)))

    def _forget(self, owner: weakref.ref[np.ndarray]) -> None:
        self._by_memory = [pair for pair in self._by_memory if all(ref is not owner for ref in pair[0].owners)]


def checksums(array: np.ndarray) -> tuple[int, ...]:
    """Returns the CRC-32 of each few megabytes of an array's rows; several threads compute them.

    >>> checksums(np.zeros(3)) == checksums(np.array([0.0, 0.0, -0.0]))
    False
    """
    rows = max(1, _BLOCK_BYTES // max(1, array.nbytes // len(array)))
    blocks = [array[start:start + rows] for start in range(0, len(array), rows)]
    if len(blocks) == 1:
        return (_checksum(array),)
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(_checksum, blocks))


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _owner(array: np.ndarray) -> np.ndarray:
    """Returns the array whose end is that of the memory; a view of it may end sooner."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
