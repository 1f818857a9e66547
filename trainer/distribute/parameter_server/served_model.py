"""A model whose parameters are on servers: the chief sends and fetches its state, and workers pull and push.

Server 0 holds the model state, such as BatchNorm's averages. Model state is not summed like gradients: it moves by the
difference between each step's output and input, which is exact for a single worker and for counts, and approximate
otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves, with_leaves
from trainer.core.types import PyTree
from trainer.distribute.parameter_server.partition import Partition
from trainer.distribute.parameter_server.partitioners import Partitioner
from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.rows.served_rows import Absent
from trainer.distribute.parameter_server.rows.spread import Share, shares
from trainer.distribute.parameter_server.served_tables import ServedTables
from trainer.distribute.parameter_server.server import Pulled, Push
from trainer.distribute.parameter_server.server_calls import call_each


class ServedModel:
    """A model on the servers, for the chief.

    Args:
      key: the model's key on the servers.
      servers: the parameter servers.
      partitioner: chooses the embedding tables to split; None splits none.

    Attributes:
      key: the model's key on the servers.
      embeddings: the paths of the tables of `nn.Embed`, which may be split; may be assigned.
      generation: number of states that the chief has sent.
      first_step: number of steps of the last sent state.
      version_of_chief: the version of the chief's `StateHolder` whose state scheduled functions train; may be assigned.
      key_of_copies: key of the model's newest copies in workers; may be assigned.
    """

    def __init__(self, key: str, servers: Sequence[Handle], partitioner: Partitioner | None = None):
        self.key = key
        self._servers, self._partitioner = list(servers), partitioner
        self._tables = ServedTables(key, servers)
        self.embeddings: Collection[str] = ()
        self._partition: Partition | None = None
        self._loaded: Any = self  # the optimizer on the servers; none yet
        self.generation = 0
        self.version_of_chief = -1
        self.key_of_copies: str | None = None
        self.first_step = self._seed = 0

    def partition_of(self, params: PyTree) -> Partition:
        """Returns the partition of parameters over the servers, from their shapes."""
        return Partition.of(params, len(self._servers), self._partitioner, self.embeddings)

    def load(self, state: TrainState) -> None:
        """Sends `state` to the servers.

        Raises:
          ValueError: if the optimizer cannot work on parts of the parameters.
          ParameterServerLostError: if a server is lost.
        """
        host = jax.device_get(state)
        self._partition = partition = self.partition_of(host.params)
        is_new = self._loaded is not state.optimizer
        if is_new:
            self._loaded = self
            if state.optimizer is not None:
                partition.check(host)
        self.generation += 1
        self.first_step, self._seed = int(host.step), int(host.seed)
        model_state = named_leaves(host.model_state)

        call_each(self._servers, "load", self.key, self.generation, state.optimizer if is_new else None, each=[
            (*partition.state_of(host, index), model_state if index == 0 else None)
            for index in range(len(self._servers))])
        self._tables.load(state, host, partition, is_new)
        self._loaded = state.optimizer

    def fetch(
        self, like: TrainState, place: Callable[[TrainState], TrainState], may_donate: bool = False
    ) -> tuple[TrainState, int]:
        """Returns the state on the servers, and the number of its updates since it was loaded.

        No update may be in progress.

        Args:
          like: a state of the same structure, of arrays or shapes.
          place: places a state of host arrays for the chief.
          may_donate: whether nothing else needs the arrays of the last loaded or fetched state.
        """
        assert self._partition is not None, "it was loaded"
        found = call_each(self._servers, "snapshot", self.key)
        params, opt_states = self._tables.fetch(self._partition, may_donate)
        state = self._partition.joined(
            like, [part for _, part, _, _ in found] + params, [part for _, _, part, _ in found] + opt_states)
        updates = found[0][0]
        state = place(state.replace(model_state=with_leaves(like.model_state, found[0][3]), seed=np.uint32(self._seed),
                                    step=np.int32(self.first_step + updates)))
        self._tables.keep(state, self._partition)
        return state, updates

    def client(self, shapes: TrainState) -> ModelClient:
        """Returns the client for workers to pull and push with, which can be sent to them."""
        assert self._partition is not None, "it was loaded"
        return ModelClient(self.key, tuple(self._servers), self._partition, shapes, self.first_step, self._seed)


@dataclasses.dataclass
class ModelClient:
    """A model on the servers, for a worker.

    Attributes:
      key: the model's key on the servers.
      servers: the parameter servers.
      partition: the partition of the model over the servers.
      shapes: the state's structure, shapes and dtypes.
      first_step: number of steps of the state when it was loaded.
      seed: seed of the random streams.
    """

    key: str
    servers: tuple[Handle, ...]
    partition: Partition
    shapes: TrainState
    first_step: int
    seed: int

    def __post_init__(self) -> None:
        self._pulled = [Pulled(None, None, None)] * len(self.servers)

    def pull(self) -> TrainState:
        """Returns the current state, with zeros as the optimizer's state, which only servers need.

        Tables are not pulled: their placeholders can only be passed to a `RowsFunction`.
        """
        answers: list[Pulled] = call_each(
            self.servers, "pull", self.key, each=[(pulled.version,) for pulled in self._pulled])
        self._pulled = [answer if answer.params is not None else answer._replace(params=self._pulled[index].params)
                        for index, answer in enumerate(answers)]
        params: dict[str, Any] = {name: leaf for pulled in self._pulled for name, leaf in (pulled.params or {}).items()}
        absent = {name: Absent(leaf.shape, leaf.dtype, functools.partial(_not_pulled, name))
                  for name, leaf in self._table_shapes.items()}
        version, _, model_state = self._pulled[0]
        assert version is not None, "it was pulled"
        return without_opt_state(self.shapes.replace(
            step=np.int32(self.first_step + version.updates), params=with_leaves(self.shapes.params, params | absent),
            model_state=with_leaves(self.shapes.model_state, model_state or {}), seed=np.uint32(self.seed)))

    def pull_rows(self, numbers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the current rows of tables; zeros for indices beyond the table."""
        rows = {name: np.zeros((len(some), *self._table_shapes[name].shape[1:]), self._table_shapes[name].dtype)
                for name, some in numbers.items()}
        parts = {name: self._shares(name, some) for name, some in numbers.items()}
        answers = call_each(self.servers, "pull_rows", self.key, each=[
            ({name: of[index].places for name, of in parts.items()},) for index in range(len(self.servers))])
        for index, answer in enumerate(answers):
            for name, some in answer.items():
                mask = parts[name][index].mask
                rows[name][:len(mask)][mask] = some
        return rows

    def push(self, number: int | None, grads: Any, value: Any, model_state: PyTree,
             numbers: Mapping[str, np.ndarray]) -> int:
        """Sends the results of a step on the last pulled state, if any; returns their largest staleness.

        Args:
          number: index of the step in its generation; each index is applied once. None is always applied.
          grads: gradients of parameters, nested dicts.
          value: the loss; None without a loss.
          model_state: the model state after the step.
          numbers: indices of the table rows of the gradients.
        """
        by_name = named_leaves(grads)
        moved = named_leaves(model_state)
        parts = {name: self._shares(name, some) for name, some in numbers.items() if name in by_name}

        def outcome(index: int) -> Push:
            pulled = self._pulled[index]
            own = {name: np.asarray(leaf) for name, leaf in by_name.items() if name in self.partition.parts[index]}
            rows = {name: (of[index].places, by_name[name][:len(of[index].mask)][of[index].mask])
                    for name, of in parts.items()}
            states = (moved, pulled.model_state) if index == 0 and pulled.model_state is not None else None
            return Push(pulled.version, number, own, value, states, rows)

        answers = call_each(self.servers, "push", self.key, each=[
            (outcome(index),) for index in range(len(self.servers))])
        return max(staleness or 0 for staleness in answers)

    @functools.cached_property
    def _table_shapes(self) -> dict[str, Any]:
        return {name: leaf for name, leaf in named_leaves(self.shapes.params).items() if name in self.partition.tables}

    def _shares(self, name: str, numbers: np.ndarray) -> list[Share]:
        return shares(numbers[numbers < self._table_shapes[name].shape[0]], len(self.servers))


def without_opt_state(state: TrainState) -> TrainState:
    """Returns a state whose optimizer state is zeros that take no memory."""
    return state.replace(opt_state=jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), state.opt_state))


def _not_pulled(name: str) -> ValueError:
    return ValueError(f"The table {name!r} is on the parameter servers, as `variable_partitioner` splits it, and a "
                      "scheduled function gets its rows in `strategy.run` alone. Pass `model.state` to a function that "
                      "`strategy.run` runs, and call the model there.")
