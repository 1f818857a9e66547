"""Files of tables that belong to no model: each server writes its rows, and reads those of any number of servers."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from trainer.distribute.parameter_server.rows.table_part import TablePart

_SHAPE = "shape"  # of the whole table, in each file


def save(part: TablePart, folder: str, name: str, index: int, servers: int, shape: tuple[int, int]) -> None:
    """Writes the rows of a server and the optimizer's state of them, in the place of an older file.

    Args:
      part: the rows. Nothing may update them.
      folder: where to.
      name: the table's.
      index: which server has them.
      servers: how many there are.
      shape: the whole table's.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{name}-{index}-of-{servers}")
    arrays: dict[str, Any] = {_SHAPE: np.array(shape), **part.arrays()}
    with open(f"{path}.new", "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", f"{path}.npz")


def remove_others(folder: str, name: str, servers: int) -> None:
    """Removes the files that other numbers of servers have written, once those of this number are whole."""
    for file in os.listdir(folder):
        found = re.fullmatch(rf"{name}-\d+-of-(\d+)\.npz", file)
        if found and int(found[1]) != servers:
            os.remove(os.path.join(folder, file))


def restore(part: TablePart, folder: str, name: str, index: int, servers: int, shape: tuple[int, int]) -> None:
    """Reads the rows of a server from the files of all servers that wrote; see `save` for the arguments.

    Raises:
      ValueError: if there is no such table in the folder, or it is of another size or optimizer.
    """
    files = os.listdir(folder) if os.path.isdir(folder) else []
    found = [int(match[1]) for file in files if (match := re.fullmatch(rf"{name}-0-of-(\d+)\.npz", file))]
    if len(found) != 1:
        raise ValueError(f"{folder!r} must have one {name!r}. Found: {len(found)}.")
    numbers, own = np.arange(index, shape[0], servers), part.arrays()
    for writer in range(found[0]):
        path = os.path.join(folder, f"{name}-{writer}-of-{found[0]}.npz")
        with np.load(path, allow_pickle=False) as saved:
            rows, features = saved[_SHAPE].tolist()
            if (rows, features) != shape:
                raise ValueError(f"The table that was saved has {rows} rows of {(features,)}. This one has {shape[0]} "
                                 f"of {shape[1:]}.")
            if saved.files != [_SHAPE, *own]:
                raise ValueError(f"The table that was saved has the state of another optimizer, {saved.files[2:]}. "
                                 f"This one has {list(own)[1:]}.")
            is_mine = numbers % found[0] == writer
            for leaf_name, leaf in own.items():
                if leaf.ndim:
                    leaf[is_mine] = saved[leaf_name][numbers[is_mine] // found[0]]
                else:
                    leaf[...] = saved[leaf_name]
