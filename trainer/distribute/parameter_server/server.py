"""Parameter server: holds a part of a model's parameters, and updates it when gradients arrive.

Gradients belong to the parameters that a worker has pulled. The staleness of a gradient is the number of updates since
then (Dean et al., "Large Scale Distributed Deep Networks", 2012).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core.compile.jit import compiled
from trainer.core.tree_paths import named_leaves, with_leaves
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.partition import part_of, update
from trainer.distribute.parameter_server.rows import stored_rows
from trainer.distribute.parameter_server.rows.table_shard import RowsWithState, SomeRows, TableShard


class Version(NamedTuple):
    """Version of parameters.

    Attributes:
      generation: number of the state from the chief that they started with.
      updates: number of updates since then.
    """

    generation: int
    updates: int


class Pulled(NamedTuple):
    """The answer to a pull.

    Attributes:
      version: version of the parameters; None before the first pull.
      params: parameters by path; None if the worker already has this version.
      model_state: model state by path, if the server holds it.
    """

    version: Version | None
    params: dict[str, np.ndarray] | None
    model_state: dict[str, np.ndarray] | None


class Push(NamedTuple):
    """The outcome of a train step.

    Attributes:
      version: version of the parameters in the computation; None for gradients of rows, which have no version.
      number: index of the step in its generation, from 0; None for a function that may run more than once.
      grads: gradients by path, of this server's parameters or fewer.
      value: the loss, for optimizers that need it; None without a loss.
      model_state: the model state by path after and before the step, for the server that holds it.
      rows: places and gradients of rows of tables by path; None without tables.
    """

    version: Version | None
    number: int | None
    grads: dict[str, np.ndarray]
    value: np.ndarray | None
    model_state: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None


class _Held(NamedTuple):
    """Pulled values of a model; arrays are replaced and never written to."""

    version: Version
    params: Any
    model_state: dict[str, np.ndarray] | None


class _ModelShard:
    """The shard of a model on this server."""

    def __init__(self, generation: int, update: Callable[..., Any] | None, params: PyTree, opt_state: PyTree,
                 model_state: PyTree, scales_by_staleness: bool, tables: dict[str, TableShard]):
        self.lock = threading.Lock()
        params, self.opt_state = jax.tree.map(jnp.asarray, (params, opt_state))
        self.now = _Held(Version(generation, 0), params, model_state)
        self._applied = _Numbers()
        self._update = update
        self._scales = scales_by_staleness
        self.tables = tables

    def close(self) -> None:
        """Makes the shard ignore further pushes."""
        with self.lock:
            self.now = self.now._replace(version=Version(-1, 0))

    def pull(self, known: Version | None) -> Pulled:
        with self.lock:
            version, params, model_state = self.now
        return Pulled(version, None if version == known else _on_host(params), model_state)

    def push(self, pushed: Push) -> int | None:
        with self.lock:
            version = self.now.version
            computed_with = pushed.version or version
            if computed_with.generation != version.generation or not self._applied.add(pushed.number):
                return None
            staleness = version.updates - computed_with.updates
            self._apply(pushed, staleness)
        return staleness

    def _apply(self, pushed: Push, staleness: int) -> None:
        version, params, model_state = self.now
        extra = {} if pushed.value is None else {"value": pushed.value}
        factor = np.float32(1.0 / (1 + staleness) if self._scales else 1.0)
        for path, (places, grads) in (pushed.rows or {}).items():
            self.tables[path].push(places, grads, extra, factor)
        if pushed.grads and self._update is not None:
            params, self.opt_state = self._update(params, self.opt_state, pushed.grads, extra, factor)
        if pushed.model_state is not None and model_state is not None:
            after, before = pushed.model_state
            model_state = {name: _moved(value, after[name], before[name], staleness)
                           for name, value in model_state.items()}
        self.now = _Held(version._replace(updates=version.updates + 1), params, model_state)


class _Numbers:
    """Indices of applied steps, which arrive roughly in order."""

    def __init__(self) -> None:
        self._first_missing = 0
        self._others: set[int] = set()

    def add(self, number: int | None) -> bool:
        """Adds an index; returns whether it is new. None is always new."""
        if number is None:
            return True
        if number < self._first_missing or number in self._others:
            return False
        self._others.add(number)
        while self._first_missing in self._others:
            self._others.remove(self._first_missing)
            self._first_missing += 1
        return True


def _update(optimizer: Any, params: PyTree, opt_state: PyTree, grads: Mapping[str, Any], extra: Any,
            factor: Any) -> Any:
    scaled = {name: (leaf * factor).astype(leaf.dtype) for name, leaf in grads.items()}
    return update(optimizer, with_leaves(part_of(params, grads), scaled), opt_state, params, extra)


def _moved(value: np.ndarray, after: np.ndarray, before: np.ndarray, staleness: int) -> np.ndarray:
    """Returns model state moved by the change of a step, exactly the step's result without staleness."""
    if staleness == 0 or not np.issubdtype(value.dtype, np.number):
        return after
    return (value + (after - before)).astype(value.dtype)


def _on_host(tree: PyTree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


class ParameterServer:
    """The object of a server's process.

    Args:
      scales_by_staleness: whether gradients are divided by 1 + their staleness.
    """

    def __init__(self, scales_by_staleness: bool):
        self._scales = scales_by_staleness
        self._models: dict[str, _ModelShard] = {}
        self._updates: dict[str, Callable[..., Any]] = {}

    def load(
        self, key: str, generation: int, optimizer: Any, params: PyTree, opt_state: PyTree, model_state: PyTree
    ) -> None:
        """Takes a part of a model, in place of its previous part of this model.

        Args:
          key: key of the model.
          generation: number of the state from the chief.
          optimizer: an `UpdateRule`, or a mapping of them by module name; None for the previous optimizer, whose update
            is already compiled.
          params: the server's parameters, nested dicts.
          opt_state: their optimizer state.
          model_state: the model state by path; None for servers that do not hold it.
        """
        if optimizer is not None:
            self._updates[key] = compiled(functools.partial(_update, optimizer))
        tables: dict[str, TableShard] = {}
        if key in self._models:
            self._models[key].close()  # tables stay, without further gradients of the previous state
            tables = self._models[key].tables
        self._models[key] = _ModelShard(
            generation, self._updates.get(key), params, opt_state, model_state, self._scales, tables)

    def pull(self, key: str, known: Version | None) -> Pulled:
        """Returns the parameters, unless the worker already has their version, `known`."""
        return self._models[key].pull(known)

    def push(self, key: str, pushed: Push) -> int | None:
        """Updates the parameters; returns the staleness, or None for a repeated or outdated push."""
        return self._models[key].push(pushed)

    def snapshot(self, key: str) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray], Any]:
        """Returns the number of updates, the parameters, the optimizer's state and the model state, each by path."""
        model = self._models[key]
        with model.lock:
            version, params, model_state = model.now
            return version.updates, _on_host(params), _on_host(model.opt_state), model_state

    def load_table(self, key: str, path: str, table: RowsWithState) -> None:
        """Takes its rows of a model's table, the parameter at `path`."""
        self._models[key].tables[path] = TableShard(path, table, self._updates.get(key))

    def replace_rows(self, key: str, path: str, rows: SomeRows) -> None:
        """Replaces some rows of a model's table, and keeps its other rows."""
        self._models[key].tables[path].replace(rows)

    def pull_rows(self, key: str, places: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of a model's tables by path, at their places in this shard."""
        return {path: self._models[key].tables[path].lookup(some) for path, some in places.items()}

    def changed_places(self, key: str, path: str) -> np.ndarray:
        """Returns the places of the rows that changed since `changed_rows`, or since the chief sent them."""
        return self._models[key].tables[path].changed_places()

    def changed_rows(self, key: str, path: str) -> SomeRows:
        """Returns the rows of a model's table that changed since the last call."""
        return self._models[key].tables[path].changed()

    def make_table(self, key: str, optimizer: Any, *arguments: Any) -> None:
        """Makes this server's rows of a standalone table; see `initial_rows` for the arguments."""
        self.load(key, 0, optimizer, {}, {}, None)
        self.load_table(key, stored_rows.PATH, stored_rows.initial_rows(optimizer, *arguments))

    def save_table(self, key: str, *place: Any) -> None:
        """Writes its rows of a standalone table; see `stored_rows.save` for the arguments."""
        stored_rows.save(self._models[key].tables[stored_rows.PATH], *place)

    def remove_other_tables(self, *place: Any) -> None:
        """Removes older files of a standalone table; see `stored_rows.remove_others` for the arguments."""
        stored_rows.remove_others(*place)

    def restore_table(self, key: str, *place: Any) -> None:
        """Reads its rows of a standalone table; see `stored_rows.restore` for the arguments."""
        stored_rows.restore(self._models[key].tables[stored_rows.PATH], *place)

    def ready(self) -> bool:
        """Returns True once the process answers."""
        return True


