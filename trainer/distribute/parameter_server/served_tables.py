"""Tables of a model on the servers, sent and fetched by the chief; only changed rows are transferred.

The chief's state has each whole table with its optimizer state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from trainer.core.compile.jit import compiled
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.distribute.parameter_server.partition import Leaves, Partition, rows_of
from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.rows.spread import padded_length
from trainer.distribute.parameter_server.rows.table_shard import SomeRows
from trainer.distribute.parameter_server.server_calls import call_each


class ServedTables:
    """The tables of a model on the servers, for the chief."""

    def __init__(self, key: str, servers: Sequence[Handle]):
        self._key, self._servers = key, list(servers)
        # Rows and optimizer state of each table, equal to the servers' except for rows that have changed since.
        self._known: dict[str, list[jax.Array]] = {}

    def load(self, state: TrainState, host: TrainState, partition: Partition, is_new: bool) -> None:
        """Sends the tables of a state, or only their changed rows, to servers that already have its generation.

        Args:
          state: the state.
          host: the same state with host arrays.
          partition: names the parameters that are tables.
          is_new: whether to send all rows, not only changed rows.
        """
        before, self._known = self._known, {}  # stays empty if a call fails
        for name in sorted(partition.tables):
            leaves = jax.tree.leaves(partition.table_of(state, name))
            is_kept = name in before and not is_new and all(
                leaf is other for leaf, other in zip(leaves, before[name], strict=True) if leaf.ndim)
            whole, count = partition.table_of(host, name), len(self._servers)
            parts = [rows_of(whole, slice(index, None, count)) for index in range(count)]
            if is_kept:
                changed = call_each(self._servers, "changed_places", self._key, name)
                call_each(self._servers, "replace_rows", self._key, name, each=[
                    (SomeRows(places, rows_of(part, places)),) for places, part in zip(changed, parts, strict=True)])
            else:
                call_each(self._servers, "load_table", self._key, name, each=[(part,) for part in parts])
        self.keep(state, partition)

    def fetch(self, partition: Partition, may_donate: bool) -> tuple[list[Leaves], list[Leaves]]:
        """Returns the tables and their optimizer state by path; `may_donate` permits reuse of the previous arrays."""
        params, opt_states = [], []
        put = _put(may_donate)
        known, self._known = self._known, {}  # servers forget the changed rows
        for name in sorted(partition.tables):
            changed: list[SomeRows] = call_each(self._servers, "changed_rows", self._key, name)
            numbers = np.concatenate([part.places * len(self._servers) + index for index, part in enumerate(changed)])
            parts = [jax.tree.leaves(part.table) for part in changed]
            leaves = [put(leaf, *_padded(numbers, np.concatenate(some), len(leaf))) if leaf.ndim else some[0]
                      for leaf, some in zip(known[name], zip(*parts, strict=True), strict=True)]
            table, opt_state = jax.tree.unflatten(jax.tree.structure(changed[0].table), leaves)
            params.append(named_leaves(table))
            opt_states.append(named_leaves(opt_state))
        return params, opt_states

    def keep(self, state: TrainState, partition: Partition) -> None:
        """Records the chief's arrays that equal the servers' tables."""
        self._known = {name: jax.tree.leaves(partition.table_of(state, name)) for name in partition.tables}


def _padded(numbers: np.ndarray, rows: np.ndarray, beyond: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns padded indices and rows; padding indices are beyond the table."""
    length = padded_length(len(numbers))
    padded = np.full(length, beyond, np.int32), np.zeros((length, *rows.shape[1:]), rows.dtype)
    padded[0][:len(numbers)], padded[1][:len(numbers)] = numbers, rows
    return padded


@functools.cache
def _put(may_donate: bool) -> Any:
    return compiled(_with_rows, donate=(0,) if may_donate else ())


def _with_rows(leaf: Any, numbers: Any, rows: Any) -> Any:
    return leaf.at[numbers].set(rows, mode="drop")
