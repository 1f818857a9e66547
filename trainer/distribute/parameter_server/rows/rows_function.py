"""A function of parameters, compiled for the table rows that it looks up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from trainer.core.compile.jit import compiled
from trainer.core.tree_paths import kept, named_leaves, with_leaves
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.rows.asked_ids import Rows, asked_ids
from trainer.distribute.parameter_server.rows.served_rows import ServedRows, Table, lookups_in_linen
from trainer.distribute.parameter_server.rows.spread import padded_length

Lookup = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Returns rows of tables by index; rows beyond a table may have any values."""


class RowsFunction:
    """A function whose first argument is parameters, including tables that only servers have.

    Args:
      function: a pure function. It gets `ServedRows` in place of the tables, and looks up rows only by `nn.Embed`.
      shapes: shapes of the parameters.
      tables: paths of the tables among them.
    """

    def __init__(self, function: Callable[..., Any], shapes: PyTree, tables: Collection[str]):
        self._function, self._shapes = function, shapes
        leaves = named_leaves(shapes)
        self._tables = {name: leaves[name] for name in sorted(tables)}
        self._asked = compiled(self._asked_ids)
        self._compiled = compiled(self._with_rows)

    def shapes(self, params: PyTree, *args: Any) -> Any:
        """Returns the shapes of the function's outputs.

        Raises:
          ValueError: if it uses a table other than by looking up rows, or if its ids cannot be known beforehand.
        """
        others = self._others(params)
        few: Rows = {}
        if self._tables:
            jax.eval_shape(self._asked_ids, others, *args)
            few = {name: (jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), jax.ShapeDtypeStruct((1,), np.int32))
                   for name, leaf in self._tables.items()}
        return jax.eval_shape(self._with_rows, few, others, *args)

    def __call__(self, lookup: Lookup | None, params: PyTree, *args: Any) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns the outputs of the function on the host, and the indices of its rows of each table.

        Args:
          lookup: returns rows; None without tables.
          params: the parameters. Tables among them are ignored.
          *args: the other arguments.
        """
        others = self._others(params)
        numbers, rows = {}, {}
        if self._tables and lookup is not None:
            asked = jax.device_get(self._asked(others, *args))
            numbers = {name: self._numbers(name, ids) for name, ids in asked.items()}
            rows = {name: (rows, numbers[name]) for name, rows in lookup(numbers).items()}
        return jax.device_get(self._compiled(rows, others, *args)), numbers

    def _numbers(self, name: str, asked: list[np.ndarray]) -> np.ndarray:
        """Returns the unique requested rows, ascending, padded with an index beyond the table to a power of two."""
        unique = np.unique(np.concatenate([np.zeros(0, np.int32), *(ids.reshape(-1) for ids in asked)]))
        unique = unique[unique >= 0]
        numbers = np.full(padded_length(len(unique)), self._tables[name].shape[0], np.int32)
        numbers[:len(unique)] = unique
        return numbers

    def _others(self, params: PyTree) -> Any:
        return kept(params, lambda name: name not in self._tables) if self._tables else params

    def _asked_ids(self, others: PyTree, *args: Any) -> Any:
        features = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in self._tables.items()}
        return asked_ids(self._with_rows, features, others, *args)

    def _with_rows(self, rows: Rows, others: PyTree, *args: Any) -> Any:
        if not self._tables:
            return self._function(others, *args)
        served = {name: ServedRows(some, Table(name, self._tables[name].shape, self._tables[name].dtype, numbers))
                  for name, (some, numbers) in rows.items()}
        with lookups_in_linen():
            return self._function(with_leaves(self._shapes, {**named_leaves(others), **served}), *args)
