"""Tables of embeddings that no process holds whole: workers look rows up, and push gradients of those rows alone.

Row r of a table is on server r % n of n; see `rows/stored_part.py` for what a server does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from trainer.core import arguments, errors
from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.rows.spread import shares
from trainer.distribute.parameter_server.server_calls import on_each


class EmbeddingTable:
    """A table of embeddings on the parameter servers; `ParameterServerStrategy.create_embedding_table` makes it.

    It can be used in scheduled functions and on the chief.

    Attributes:
      num_embeddings: how many rows it has.
      features: how many values each row has.
    """

    def __init__(self, key: str, num_embeddings: int, features: int, servers: Sequence[Handle]):
        self.num_embeddings, self.features = num_embeddings, features
        self._key, self._servers = key, tuple(servers)

    def lookup(self, ids: ArrayLike) -> np.ndarray:
        """Returns the rows of some ids: float32 of shape `(*ids.shape, features)`.

        Args:
          ids: integers of any shape, from 0 to `num_embeddings - 1`.

        Raises:
          ValueError: for other ids.
          ParameterServerLostError: if a server is gone.
        """
        numbers = self._checked(ids)
        unique, places = np.unique(numbers, return_inverse=True)
        rows = np.empty((len(unique), self.features), np.float32)
        parts = shares(unique, len(self._servers))
        answers = on_each([functools.partial(server.call, "lookup", self._key, part.places)
                           for server, part in zip(self._servers, parts, strict=True)])
        for part, answer in zip(parts, answers, strict=True):
            rows[part.mask] = answer
        return rows[places.reshape(-1)].reshape(*numbers.shape, self.features)

    def push(self, ids: ArrayLike, grads: ArrayLike) -> None:
        """Updates the rows of some ids by the optimizer. Gradients of an id that is there several times are summed.

        Args:
          ids: as in `lookup`.
          grads: the gradients of what `lookup` returned for them, of the same shape.

        Raises:
          ValueError: for other ids, or gradients of another shape.
          ParameterServerLostError: if a server is gone.
        """
        numbers, grads = self._checked(ids), np.asarray(grads, np.float32)
        if grads.shape != (*numbers.shape, self.features):
            raise ValueError(f"`grads` must have the shape of what `lookup` returns for `ids`, "
                             f"{(*numbers.shape, self.features)}. Received: {grads.shape}.")
        unique, places = np.unique(numbers, return_inverse=True)
        summed = np.zeros((len(unique), self.features), np.float32)
        np.add.at(summed, places.reshape(-1), grads.reshape(-1, self.features))
        on_each([functools.partial(server.call, "push_rows", self._key, part.places, summed[part.mask])
                 for server, part in zip(self._servers, shares(unique, len(self._servers)), strict=True)])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the rows, and the optimizer's state of each, into a folder that all servers see.

        Each server writes a file of its own, which takes the place of an older one when it is whole. Nothing may be
        running.
        """
        path = _path(folder)
        os.makedirs(path, exist_ok=True)
        self._on_each("save_table", path)
        self._servers[0].call("remove_other_tables", self._key, path)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Reads what `save` wrote, also on another number of servers.

        Raises:
          ValueError: if there is no such table in the folder, or it is of another size or optimizer.
        """
        self._on_each("restore_table", _path(folder))

    def _on_each(self, method: str, path: str) -> None:
        on_each([functools.partial(server.call, method, self._key, path) for server in self._servers])

    def _checked(self, ids: ArrayLike) -> np.ndarray:
        numbers = np.asarray(ids)
        if not np.issubdtype(numbers.dtype, np.integer):
            raise errors.wrong_type("ids", ids, "integers")
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_embeddings):
            raise ValueError(f"`ids` must be from 0 to {self.num_embeddings - 1}. Received: {numbers.min()} to "
                             f"{numbers.max()}.")
        return numbers


def _path(folder: str | os.PathLike[str]) -> str:
    return os.path.abspath(arguments.as_path("folder", folder, "the path of a folder"))
