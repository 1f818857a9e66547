"""A server's part of a table that belongs to no model: servers make it, save it and restore it themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compile.jit import compiled
from trainer.distribute.parameter_server.rows.table_part import TablePart
from trainer.optimizers import Optimizer

_ROWS_AT_ONCE = 2**16  # that are made at a time


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer that does not look at each row on its own."""
    if optimizer.gradient_accumulation_steps > 1:
        raise ValueError("`gradient_accumulation_steps` cannot be used for tables: each push is of other rows. Leave "
                         "it out of the optimizer.")
    rng = np.random.default_rng(0)
    rows, grads = (rng.normal(size=(2, 3)).astype(np.float32) for _ in range(2))
    both = optimizer.update(10 * grads, optimizer.init(jnp.asarray(rows)), jnp.asarray(rows))[0]
    each = [optimizer.update(10 * grads[row:row + 1], optimizer.init(jnp.asarray(rows[row:row + 1])),
                             jnp.asarray(rows[row:row + 1]))[0] for row in (0, 1)]
    shapes = {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, jnp.zeros((2, 3))))}
    if not np.allclose(both, np.concatenate(each), rtol=1e-4, atol=1e-7) or shapes - {(2, 3), ()}:
        raise ValueError("`optimizer` must look at each row of a table on its own, as Adagrad, Adam, RMSprop and SGD "
                         f"do. Received: {optimizer.name}.")


class StoredPart(TablePart):
    """The rows of a table that one server has, which it makes, saves and restores.

    Args:
      index: which server it is.
      servers: how many there are.
      num_embeddings: how many rows the table has.
      features: how many values each row has.
      optimizer: what updates them: one that looks at each value on its own.
      initializer: makes rows from a key, a shape and a dtype, as Flax's initializers.
      seed: what the first rows derive from, for any number of servers.
    """

    def __init__(self, index: int, servers: int, num_embeddings: int, features: int, optimizer: Optimizer,
                 initializer: Callable[..., Any], seed: int):
        self._index, self._servers, self._size = index, servers, num_embeddings
        self._optimizer = optimizer
        rows = np.empty((len(range(index, num_embeddings, servers)), features), np.float32)

        def make(numbers: Any) -> Any:
            key = jax.random.key(seed)
            return jax.vmap(lambda number: initializer(jax.random.fold_in(key, number), (1, features), jnp.float32)[0])(
                numbers)

        made = compiled(make)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            numbers = index + servers * np.arange(start, min(start + _ROWS_AT_ONCE, len(rows)))
            rows[start:start + len(numbers)] = made(numbers.astype(np.uint32))
        # Of one row, as there may be too many for an optimizer's device.
        one = optimizer.init(jnp.zeros((1, features)))
        self._names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(one)]
        super().__init__(rows, jax.tree.map(lambda leaf: np.broadcast_to(leaf, rows.shape) if leaf.ndim else leaf, one),
                         compiled(self._updated))

    def save(self, folder: str, key: str) -> None:
        """Writes this part."""
        path = os.path.join(folder, f"{key}-{self._index}-of-{self._servers}")
        with self._lock:
            leaves = [self._rows, *self._state, np.array(self._names, np.str_)]
            for number, leaf in enumerate(leaves):
                with open(f"{path}.{number}.new", "wb") as file:
                    np.save(file, leaf, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
            for number in range(len(leaves)):
                os.replace(f"{path}.{number}.new", f"{path}.{number}.npy")

    def remove_others(self, folder: str, key: str) -> None:
        """Removes the parts that other numbers of servers have written, once those of this number are whole."""
        for name in os.listdir(folder):
            found = re.fullmatch(rf"{key}-\d+-of-(\d+)\.\d+\.npy", name)
            if found and int(found[1]) != self._servers:
                os.remove(os.path.join(folder, name))

    def restore(self, folder: str, key: str) -> None:
        """Reads the rows of this part from those of all servers that wrote."""
        names = os.listdir(folder) if os.path.isdir(folder) else []
        written = [name for name in names if name.startswith(f"{key}-0-of-") and name.endswith(".0.npy")]
        if len(written) != 1:
            raise ValueError(f"{folder!r} must have one {key!r}. Found: {len(written)}.")
        before = int(written[0].removesuffix(".0.npy").rpartition("-")[2])
        last = len([name for name in names if name.startswith(f"{key}-0-of-{before}.") and name.endswith(".npy")]) - 1
        of_optimizer = np.load(os.path.join(folder, f"{key}-0-of-{before}.{last}.npy"), allow_pickle=False).tolist()
        if of_optimizer != self._names:
            raise ValueError(f"The table that was saved has the state of another optimizer, {of_optimizer}. That of "
                             f"this one, {self._optimizer.name}, is {self._names}.")
        with self._lock:
            for number, leaf in enumerate([self._rows, *self._state]):
                parts = [np.load(os.path.join(folder, f"{key}-{part}-of-{before}.{number}.npy"), mmap_mode="r",
                                 allow_pickle=False) for part in range(before)]
                self._take(leaf, number, parts)

    def _take(self, leaf: np.ndarray, number: int, parts: Sequence[np.ndarray]) -> None:
        if number and not leaf.ndim:
            self._state[number - 1] = np.array(parts[0])
            return
        if sum(map(len, parts)) != self._size or parts[0].shape[1:] != leaf.shape[1:]:
            raise ValueError(f"The table that was saved has {sum(map(len, parts))} rows of {parts[0].shape[1:]}. This "
                             f"one has {self._size} of {leaf.shape[1:]}.")
        numbers = np.arange(self._index, self._size, self._servers)
        for part, rows in enumerate(parts):
            mine = numbers % len(parts) == part
            leaf[mine] = rows[numbers[mine] // len(parts)]

    def _updated(self, rows: Any, state: Any, grads: Any, extra: Any, factor: Any) -> Any:
        updates, after = self._optimizer.update(grads * factor, state, rows, extra)
        return rows + updates, after
