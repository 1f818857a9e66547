"""Arrays as raw bytes in the files of a folder: each process writes its shards, and reads the shards it needs.

Owns two files per process: `0.bytes`, the shards of arrays one after the other, and `0.json`, the position of each
shard in the file and in its array. Knows nothing of the order of saving, or of the meaning of arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import math
import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.core.files import new_file, open_file, read_json

_BLOCK_BYTES = 2**18  # is hashed and written while it is in the processor's cache
_READ_BYTES = 2**26  # that are in memory beside an array of which not all columns are read
_COLLECT_BYTES = 2**26

Window = tuple[slice, ...]  # start and stop in each dimension


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """Location of a shard of an array in a file.

    Attributes:
      path: file of the shard.
      offset: start of the shard in the file, in bytes.
      window: position of the shard in the array.
    """

    path: str
    offset: int
    window: Window

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return _shape_of(self.window)


def write_shards(folder: str, process: int, arrays: MutableMapping[str, jax.Array]) -> dict[str, dict[str, Any]]:
    """Writes the shards of arrays that this process is the first to hold; its files are on the disk on return.

    Args:
      folder: existing folder.
      process: index of this process.
      arrays: arrays by name. Each array is removed after it is written, to free its memory.

    Returns:
      "size" and "sha256" of each written file, by its name.

    Raises:
      OSError: if a file cannot be written.
    """
    index: dict[str, list[dict[str, Any]]] = {}
    kept = 0
    with new_file(os.path.join(folder, f"{process}.bytes")) as opened:
        file = _HashedFile(opened)
        while arrays:
            name = next(iter(arrays))
            array = arrays.pop(name)
            held = [shard for shard in array.addressable_shards if shard.replica_id == 0 and shard.data.size]
            index[name] = []
            for shard in held:
                index[name].append({"offset": file.size, "window": [
                    part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]})
                file.write(np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8).data)
            kept += array.nbytes
            del array, held
            if kept > _COLLECT_BYTES:  # since JAX 0.12 a fetched array can be part of a reference cycle
                gc.collect(1)
                kept = 0
    with new_file(os.path.join(folder, f"{process}.json")) as opened:
        described = _HashedFile(opened)
        described.write(memoryview(json.dumps(index).encode()))
    return {f"{process}.bytes": file.summary, f"{process}.json": described.summary}


def read_index(folder: str, processes: int) -> dict[str, list[ArrayShard]]:
    """Returns the locations of the shards of each array by name, from the files of that many processes."""
    found: dict[str, list[ArrayShard]] = {}
    for process in range(processes):
        path = os.path.join(folder, f"{process}.json")
        try:
            index = read_json(path, os.path.dirname(folder))
        except FileNotFoundError:
            raise ValueError(f"Arrays were saved by {processes} processes, and there is no {path!r}.") from None
        for name, shards in index.items():
            found.setdefault(name, []).extend(
                ArrayShard(os.path.join(folder, f"{process}.bytes"), shard["offset"],
                           tuple(slice(*bounds) for bounds in shard["window"])) for shard in shards)
    return found


class ShardFiles:
    """The files of shards, of which the last used one stays open: arrays lie in it one after the other.

    Use it in a `with` statement.
    """

    def __init__(self) -> None:
        self._path, self._file = "", contextlib.ExitStack()
        self._opened: Any = None

    def opened(self, shard: ArrayShard) -> Any:
        """Returns the open file of a shard."""
        if self._path != shard.path:
            self._file.close()
            self._opened = self._file.enter_context(
                open_file(shard.path, os.path.dirname(os.path.dirname(shard.path)), buffering=0))
            self._path = shard.path
        return self._opened

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_array(shards: Sequence[ArrayShard], target: jax.ShapeDtypeStruct, files: ShardFiles) -> jax.Array:
    """Returns an array with the sharding of `target`; this process reads the data of its own devices.

    Raises:
      ValueError: if a file is truncated, or the shards do not cover each value of the array once.
    """
    _check_covers_once(shards, target.shape)
    windows: dict[Any, np.ndarray] = {}

    def window_at(index: Any) -> np.ndarray:
        window = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, target.shape, strict=True))
        key = tuple((part.start, part.stop) for part in window)
        if key not in windows:
            windows[key] = _read_window(shards, window, np.dtype(target.dtype), files)
        return windows[key]

    # Arrays are placed individually: a single array at a time is in host memory twice.
    return jax.block_until_ready(jax.make_array_from_callback(target.shape, target.sharding, window_at))


class _HashedFile:
    """A new file whose checksum is computed during the write."""

    def __init__(self, file: Any):
        self.size = 0
        self._file, self._digest = file, hashlib.sha256()

    def write(self, content: memoryview) -> None:
        while content:
            count = self._file.write(content[:_BLOCK_BYTES])  # fewer bytes where the disk is nearly full
            self._digest.update(content[:count])
            self.size += count
            content = content[count:]

    @property
    def summary(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self._digest.hexdigest()}


def _read_window(shards: Sequence[ArrayShard], window: Window, dtype: np.dtype, files: ShardFiles) -> np.ndarray:
    values = np.empty(_shape_of(window), dtype)
    for shard in shards:
        common = tuple(slice(max(wanted.start, there.start), min(wanted.stop, there.stop))
                       for wanted, there in zip(window, shard.window, strict=True))
        if all(each.start < each.stop for each in common):
            place: Any = (*_relative(common, window), ...)  # also of a scalar it is a view
            _read_into(values[place], shard, _relative(common, shard.window), files.opened(shard))
    return values


def _check_covers_once(shards: Sequence[ArrayShard], shape: tuple[int, ...]) -> None:
    """Raises ValueError unless shards are the cells of a grid over an array, as the shards of a sharding are."""
    windows = {tuple((part.start, part.stop) for part in shard.window) for shard in shards}
    if not all(type(bound) is int for window in windows for bounds in window for bound in bounds):
        raise ValueError("The bounds of its parts are not whole numbers.")
    parts = [sorted(set(bounds)) for bounds in zip(*windows, strict=True)]
    covered = [found[0][0] == 0 and found[-1][1] == size and all(start < stop for start, stop in found) and all(
        one[1] == following[0] for one, following in itertools.pairwise(found))
        for found, size in zip(parts, shape, strict=bool(windows))]
    is_grid = all(covered) and len(shards) == len(windows) == math.prod(map(len, parts))
    if not is_grid and (shards or math.prod(shape)):
        raise ValueError(f"The {len(shards)} parts of an array of shape {shape} do not cover each of its values once.")


def _read_into(target: np.ndarray, shard: ArrayShard, inside: Window, file: Any) -> None:
    """Reads a window of a shard."""
    shape, size = shard.shape, target.dtype.itemsize
    if target.shape[1:] == shape[1:] and target.flags.c_contiguous:
        first = inside[0].start * math.prod(shape[1:]) if shape else 0
        _fill(target, file, shard.offset + first * size)
        return
    rows = max(1, _READ_BYTES // (size * math.prod(shape[1:])))
    for start in range(inside[0].start, inside[0].stop, rows):
        block = np.empty((min(rows, inside[0].stop - start), *shape[1:]), target.dtype)
        _fill(block, file, shard.offset + start * math.prod(shape[1:]) * size)
        target[start - inside[0].start:][:len(block)] = block[(slice(None), *inside[1:])]


def _fill(values: np.ndarray, file: Any, offset: int) -> None:
    content = values.reshape(-1).view(np.uint8).data
    if not 0 <= offset <= file.seek(0, os.SEEK_END):
        raise ValueError(f"{file.name!r} is cut short, or its index is damaged.")
    file.seek(offset)
    done = 0
    while done < len(content):  # one call reads 2 GiB at most
        count = file.readinto(content[done:])
        if not count:
            raise ValueError(f"{file.name!r} is cut short.")
        done += count


def _shape_of(window: Window) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in window)


def _relative(window: Window, to: Window) -> Window:
    return tuple(slice(part.start - origin.start, part.stop - origin.start)
                 for part, origin in zip(window, to, strict=True))
