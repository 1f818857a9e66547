"""A server's part of a table: some of its rows, with the optimizer's state of each.

A row and its state change only when the row has a gradient ("lazy" updates, as TensorFlow's of sparse gradients).
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


class SomeRows(NamedTuple):
    """Some rows of a part.

    Attributes:
      places: where the part has them.
      params: the rows, in the part's tree of parameters.
      opt_state: the optimizer's state: that of the rows, and the numbers that all rows share.
    """

    places: np.ndarray
    params: PyTree
    opt_state: PyTree


class TablePart:
    """The rows of a table that one server has.

    Args:
      path: the table's.
      params: a tree of one array, the rows.
      opt_state: the optimizer's state, of which each leaf has rows too, or is a number that all rows share.
      update: `(params, opt_state, grads by path, extra, factor) -> (params, opt_state)` of a few rows, compiled; None
        without an optimizer.
    """

    def __init__(self, path: str, params: PyTree, opt_state: PyTree, update: Callable[..., Any] | None):
        self._lock, self._path = threading.Lock(), path
        (rows,), self._structure = jax.tree.flatten(params)
        leaves, self._state_structure = jax.tree.flatten(opt_state)
        # Of its own, to be written to.
        self._rows: np.ndarray = np.require(rows, requirements=["O", "W"])
        self._state: list[np.ndarray] = [np.require(leaf, requirements=["O", "W"]) for leaf in leaves]
        self._update = update
        self._is_changed = np.zeros(len(self._rows), bool)  # since the chief has last asked

    def lookup(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows at some places."""
        with self._lock:
            return self._rows[places]

    def push(self, places: np.ndarray, grads: np.ndarray, extra: Mapping[str, Any], factor: Any) -> None:
        """Updates the rows at some places.

        Args:
          places: each is there once.
          grads: the gradients of these rows.
          extra: what the optimizer may ask for besides.
          factor: scales the gradients.
        """
        assert self._update is not None, "gradients have an optimizer"
        length = padded_length(len(places))  # the rest is of rows that are not there
        padded = np.zeros((length, *grads.shape[1:]), self._rows.dtype)
        padded[:len(places)] = grads
        index = np.zeros(length, np.int64)
        index[:len(places)] = places
        with self._lock:
            before = self._at(index) if len(self._rows) else self._nothing()
            params, state = jax.device_get(self._update(
                before.params, before.opt_state, {self._path: padded}, dict(extra), factor))
            self._set(places, jax.tree.map(lambda leaf: leaf[:len(places)], params),
                      jax.tree.map(lambda leaf: leaf[:len(places)] if leaf.ndim else leaf, state))
            self._is_changed[places] = True

    def replace(self, rows: SomeRows) -> None:
        """Takes rows, and the numbers that all rows share, in the place of its own."""
        with self._lock:
            self._set(rows.places, rows.params, rows.opt_state)
            self._is_changed[:] = False

    def changed(self) -> SomeRows:
        """Returns the rows that have changed since the last time, or since they were replaced."""
        with self._lock:
            places = np.flatnonzero(self._is_changed)
            self._is_changed[:] = False
            return self._at(places)

    def changed_places(self) -> np.ndarray:
        """Returns where the rows are that `changed` would return."""
        with self._lock:
            return np.flatnonzero(self._is_changed)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the rows, and then the optimizer's state of them by paths, to be read and written to."""
        state = jax.tree.unflatten(self._state_structure, self._state)
        return {"rows": self._rows, **named_leaves({"optimizer": state})}

    def _at(self, places: np.ndarray) -> SomeRows:
        params = jax.tree.unflatten(self._structure, [self._rows[places]])
        state = [leaf[places] if leaf.ndim else leaf.copy() for leaf in self._state]
        return SomeRows(places, params, jax.tree.unflatten(self._state_structure, state))

    def _nothing(self) -> SomeRows:
        """Returns a row of zeros, for a part without rows, whose numbers that all rows share still move."""
        def zeros(leaf: np.ndarray) -> np.ndarray:
            return np.zeros((1, *leaf.shape[1:]), leaf.dtype) if leaf.ndim else leaf

        return SomeRows(np.zeros(0, np.int64), jax.tree.unflatten(self._structure, [zeros(self._rows)]),
                        jax.tree.unflatten(self._state_structure, list(map(zeros, self._state))))

    def _set(self, places: Any, params: PyTree, opt_state: PyTree) -> None:
        (self._rows[places],) = jax.tree.leaves(params)
        for own, leaf in zip(self._state, jax.tree.leaves(opt_state), strict=True):
            own[places if own.ndim else ...] = leaf
