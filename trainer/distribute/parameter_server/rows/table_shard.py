"""A server's shard of a table: some of its rows, with their optimizer state.

A row and its state change only when the row has a gradient ("lazy" updates, as TensorFlow's for sparse gradients).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.rows.spread import padded_length

RowsWithState = tuple[PyTree, PyTree]
"""A tree of one array, the rows, and the optimizer's state, whose leaves have rows too or are scalars for all rows."""


class SomeRows(NamedTuple):
    """Some rows of a shard, with their places in the shard."""

    places: np.ndarray
    table: RowsWithState


class TableShard:
    """The rows of a table on a server.

    Args:
      path: path of the table.
      table: the rows.
      update: `(params, opt_state, grads by path, extra, factor) -> (params, opt_state)` of a few rows, compiled; None
        without an optimizer.
    """

    def __init__(self, path: str, table: RowsWithState, update: Callable[..., Any] | None):
        self._lock, self._path, self._update = threading.Lock(), path, update
        leaves, self._structure = jax.tree.flatten(table)
        # Owned and writable; the rows come first.
        self._leaves: list[np.ndarray] = [np.require(leaf, requirements=["O", "W"]) for leaf in leaves]
        self._is_changed = np.zeros(len(self._leaves[0]), bool)  # since the chief's last request

    def lookup(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows at some places."""
        with self._lock:
            return self._leaves[0][places]

    def push(self, places: np.ndarray, grads: np.ndarray, extra: Mapping[str, Any], factor: Any) -> None:
        """Updates the rows at unique places by their gradients times `factor`."""
        assert self._update is not None, "gradients have an optimizer"
        length = padded_length(len(places))  # the rest is padding
        padded = np.zeros((length, *grads.shape[1:]), self._leaves[0].dtype)
        padded[:len(places)] = grads
        index = np.zeros(length, np.int64)
        index[:len(places)] = places
        with self._lock:
            after = jax.device_get(self._update(*self._at(index), {self._path: padded}, dict(extra), factor))
            self._set(places, jax.tree.map(lambda leaf: leaf[:len(places)] if leaf.ndim else leaf, after))
            self._is_changed[places] = True

    def replace(self, rows: SomeRows) -> None:
        """Replaces rows, and the scalars that all rows share."""
        with self._lock:
            self._set(rows.places, rows.table)
            self._is_changed[:] = False

    def changed(self) -> SomeRows:
        """Returns the rows that changed since the last call, or since they were replaced."""
        with self._lock:
            places = np.flatnonzero(self._is_changed)
            self._is_changed[:] = False
            return SomeRows(places, self._at(places))

    def changed_places(self) -> np.ndarray:
        """Returns the places of the rows that `changed` would return."""
        with self._lock:
            return np.flatnonzero(self._is_changed)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the rows, and then their optimizer state by path; the arrays may be read and written."""
        _, opt_state = jax.tree.unflatten(self._structure, self._leaves)
        return {"rows": self._leaves[0], **named_leaves({"optimizer": opt_state})}

    def _at(self, places: np.ndarray) -> RowsWithState:
        """Returns the rows at some places; zeros for a shard without rows, whose shared scalars still change."""
        def rows(leaf: np.ndarray) -> np.ndarray:
            if leaf.ndim == 0:
                return leaf.copy()
            return leaf[places] if len(leaf) else np.zeros((len(places), *leaf.shape[1:]), leaf.dtype)

        return jax.tree.unflatten(self._structure, list(map(rows, self._leaves)))

    def _set(self, places: np.ndarray, table: RowsWithState) -> None:
        for own, leaf in zip(self._leaves, jax.tree.leaves(table), strict=True):
            own[places if own.ndim else ...] = leaf
