"""The first rows of a table that belongs to no model, which each server makes for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compile.jit import compiled
from trainer.core.types import PyTree

PATH = "rows"  # of the one parameter of such a table
_ROWS_AT_ONCE = 2**16  # that are made at a time


def initial_rows(
    optimizer: Any, numbers: range, features: int, initializer: Callable[..., Any], seed: int
) -> tuple[PyTree, PyTree]:
    """Returns rows of a table and the optimizer's state of them, as trees of parameters.

    Args:
      optimizer: an `UpdateRule`.
      numbers: which rows of the table they are.
      features: how many values each row has.
      initializer: makes rows from a key, a shape and a dtype, as Flax's initializers.
      seed: what the rows derive from, each by its number.
    """
    def make(numbers: Any) -> Any:
        key = jax.random.key(seed)
        return jax.vmap(lambda number: initializer(jax.random.fold_in(key, number), (1, features), jnp.float32)[0])(
            numbers)

    made = compiled(make)
    rows = np.empty((len(numbers), features), np.float32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = np.asarray(numbers[start:start + _ROWS_AT_ONCE], np.uint32)
        rows[start:start + len(some)] = made(some)
    # Of one row, as there may be too many for an optimizer's device.
    one = jax.device_get(optimizer.init({PATH: jnp.zeros((1, features))}))
    return {PATH: rows}, jax.tree.map(lambda leaf: np.broadcast_to(leaf, rows.shape) if leaf.ndim else leaf, one)
