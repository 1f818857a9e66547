"""Embedding tables that no process holds whole: workers look up rows, and push gradients of these rows only.

For the servers such a table is a model with a single parameter, whose rows they make, save and restore themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments, errors
from trainer.core.train_state import initial_state
from trainer.distribute.parameter_server.partition import Partition
from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.rows.stored_rows import PATH
from trainer.distribute.parameter_server.served_model import ModelClient
from trainer.distribute.parameter_server.server_calls import call_each
from trainer.optimizers.update_rule import UpdateRule


class EmbeddingTable:
    """An embedding table on the parameter servers, made by `ParameterServerStrategy.create_embedding_table`.

    It can be used in scheduled functions and on the chief.

    Attributes:
      num_embeddings: number of rows.
      features: number of values in each row.
    """

    def __init__(self, name: str, client: ModelClient):
        self.num_embeddings, self.features = client.shapes.params[PATH].shape
        self._name, self._client = name, client

    def lookup(self, ids: ArrayLike) -> np.ndarray:
        """Returns the rows of ids: float32 of shape `(*ids.shape, features)`.

        Args:
          ids: integers of any shape, from 0 to `num_embeddings - 1`.

        Raises:
          ValueError: if an id is out of range.
          ParameterServerLostError: if a server is lost.
        """
        numbers = self._checked(ids)
        unique, places = np.unique(numbers, return_inverse=True)
        rows = self._client.pull_rows({PATH: unique})[PATH]
        return rows[places.reshape(-1)].reshape(*numbers.shape, self.features)

    def push(self, ids: ArrayLike, grads: ArrayLike) -> None:
        """Updates the rows of ids by the optimizer. Gradients of repeated ids are summed.

        Args:
          ids: as in `lookup`.
          grads: gradients of the rows from `lookup`, of the same shape.

        Raises:
          ValueError: if an id is out of range, or the gradients have another shape.
          ParameterServerLostError: if a server is lost.
        """
        numbers, grads = self._checked(ids), np.asarray(grads, np.float32)
        if grads.shape != (*numbers.shape, self.features):
            raise ValueError(f"`grads` must have the shape of what `lookup` returns for `ids`, "
                             f"{(*numbers.shape, self.features)}. Received: {grads.shape}.")
        unique, places = np.unique(numbers, return_inverse=True)
        summed = np.zeros((len(unique), self.features), np.float32)
        np.add.at(summed, places.reshape(-1), grads.reshape(-1, self.features))
        self._client.push(None, {PATH: summed}, None, {}, {PATH: unique})

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the rows and their optimizer state into a folder that all servers can access.

        Each server writes its own file, which replaces an older file once it is complete. No function may be running.
        """
        path = self._on_each("save_table", folder)
        servers = self._client.servers
        servers[0].call("remove_other_tables", path, self._name, len(servers))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Reads a table written by `save`, possibly with another number of servers.

        Raises:
          ValueError: if the folder has no such table, or its size or optimizer differs.
        """
        self._on_each("restore_table", folder)

    def _on_each(self, method: str, folder: str | os.PathLike[str]) -> str:
        path = os.path.abspath(arguments.as_path("folder", folder, "the path of a folder"))
        servers, shape = self._client.servers, (self.num_embeddings, self.features)
        call_each(servers, method, self._client.key, path, self._name, shape, each=[
            (index, len(servers)) for index in range(len(servers))])
        return path

    def _checked(self, ids: ArrayLike) -> np.ndarray:
        numbers = np.asarray(ids)
        if not np.issubdtype(numbers.dtype, np.integer):
            raise errors.wrong_type("ids", ids, "integers")
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_embeddings):
            raise ValueError(f"`ids` must be from 0 to {self.num_embeddings - 1}. Received: {numbers.min()} to "
                             f"{numbers.max()}.")
        return numbers


def make_table(
    servers: Sequence[Handle], name: str, num_embeddings: int, features: int, rule: UpdateRule,
    initializer: Callable[..., Any], seed: int,
) -> EmbeddingTable:
    """Makes a table on servers; see `ParameterServerStrategy.create_embedding_table`.

    Raises:
      ValueError: if the optimizer combines rows, or does not make an update for each push.
    """
    partition = Partition(tuple(frozenset[str]() for _ in servers), frozenset({PATH}))
    some_rows = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    try:
        state = jax.device_get(initial_state({PATH: some_rows}, {}, rule, jnp.uint32(0)))
        partition.check(state)
    except ValueError as error:
        raise ValueError("`optimizer` must look at each row of a table on its own, and update it by each gradient, as "
                         f"Adagrad, Adam, RMSprop and SGD do. Received: {rule.optimizer.name}.") from error
    key = f"table {name}"
    call_each(servers, "make_table", key, rule, each=[
        (range(index, num_embeddings, len(servers)), features, initializer, seed) for index in range(len(servers))])
    shapes = state.replace(params={PATH: jax.ShapeDtypeStruct((num_embeddings, features), np.float32)},
                           opt_state=None, optimizer=None)
    return EmbeddingTable(name, ModelClient(key, tuple(servers), partition, shapes, 0, 0))
