"""Rows of a standalone table: each server makes, writes and reads its own, from files of any number of servers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core.compile.jit import compiled
from trainer.core.errors import brief, naming_file
from trainer.core.files import check_expansion, open_file
from trainer.distribute.parameter_server.rows.table_shard import RowsWithState, TableShard

PATH = "rows"  # of the single parameter of such a table
_SHAPE = "shape"  # of the whole table, in each file
_ROWS_AT_ONCE = 2**16  # made at a time


def initial_rows(
    optimizer: Any, numbers: range, features: int, initializer: Callable[..., Any], seed: int
) -> RowsWithState:
    """Returns rows, each derived from the seed and its index, and the state of an `UpdateRule` for them."""
    def make(numbers: Any) -> Any:
        key = jax.random.key(seed)
        return jax.vmap(lambda number: initializer(jax.random.fold_in(key, number), (1, features), jnp.float32)[0])(
            numbers)

    made = compiled(make)
    rows = np.empty((len(numbers), features), np.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = np.asarray(numbers[start:start + _ROWS_AT_ONCE], np.uint32)
        rows[start:start + len(some)] = made(some)
    # For one row, because all rows may be too many for the device.
    one = jax.device_get(optimizer.init({PATH: jnp.zeros((1, features))}))
    return {PATH: rows}, jax.tree.map(lambda leaf: np.broadcast_to(leaf, rows.shape) if leaf.ndim else leaf, one)


def save(shard: TableShard, folder: str, name: str, shape: tuple[int, int], index: int, servers: int) -> None:
    """Writes the rows of a server in place of an older file; no update may be in progress."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{name}-{index}-of-{servers}")
    arrays: dict[str, Any] = {_SHAPE: np.array(shape), **shard.arrays()}
    with open(f"{path}.new", "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", f"{path}.npz")


def remove_others(folder: str, name: str, servers: int) -> None:
    """Removes the files of other numbers of servers, once the files of this number are complete."""
    for file in os.listdir(folder):
        found = re.fullmatch(rf"{name}-\d+-of-(\d+)\.npz", file)
        if found and int(found[1]) != servers:
            os.remove(os.path.join(folder, file))


def restore(shard: TableShard, folder: str, name: str, shape: tuple[int, int], index: int, servers: int) -> None:
    """Reads the rows of a server from the files of all servers that wrote."""
    files = os.listdir(folder) if os.path.isdir(folder) else []
    found = [int(match[1]) for file in files if (match := re.fullmatch(rf"{name}-0-of-(\d+)\.npz", file))]
    if len(found) != 1:
        raise ValueError(f"{folder!r} must have one {name!r}. Found: {len(found)}.")
    numbers, own = np.arange(index, shape[0], servers), shard.arrays()
    for writer in range(found[0]):
        path = os.path.join(folder, f"{name}-{writer}-of-{found[0]}.npz")
        with naming_file(path), open_file(path, folder) as file, np.load(file, allow_pickle=False) as saved:
            check_expansion(path, os.path.getsize(path), sum(member.file_size for member in saved.zip.infolist()))
            rows, *features = saved[_SHAPE].tolist()
            if (rows, *features) != shape:
                raise ValueError(f"The table that was saved has {rows} rows of {tuple(features)}. This one has "
                                 f"{shape[0]} of {shape[1:]}.")
            if saved.files != [_SHAPE, *own]:
                raise ValueError(f"The table that was saved has the state of another optimizer, "
                                 f"{brief(saved.files[2:])}. "
                                 f"This one has {list(own)[1:]}.")
            is_mine = numbers % found[0] == writer
            for array, leaf in own.items():
                if leaf.ndim:
                    leaf[is_mine] = saved[array][numbers[is_mine] // found[0]]
                else:
                    leaf[...] = saved[array]
