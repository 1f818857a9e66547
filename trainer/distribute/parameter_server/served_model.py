"""A model whose parameters are on servers: as the chief sends and fetches its state, and as a worker pulls and pushes.

Server 0 holds the model state, such as BatchNorm's averages. It is not summed as gradients are: it moves as far as each
step has moved what the step was given, which is exact for one worker and for counts, and near it otherwise.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves, with_leaves
from trainer.distribute.parameter_server.partition import Partition
from trainer.distribute.parameter_server.processes.engine import Handle, RemoteCallError
from trainer.distribute.parameter_server.processes.failures import ParameterServerLostError, ProcessLostError
from trainer.distribute.parameter_server.rounds import BatchPart
from trainer.distribute.parameter_server.server import Pulled, Push, Version

Answer = TypeVar("Answer")


def on_each(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Returns what calls of several servers return, made at the same time.

    Raises:
      ParameterServerLostError: if one of them is gone.
    """
    if len(calls) == 1:
        return [_of_server(calls[0])]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(_of_server, calls))


def _of_server(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except ProcessLostError as error:
        raise ParameterServerLostError(
            f"{error} The parameters that it held are gone. Start the same command again: with "
            "`callbacks.BackupAndRestore`, `fit` goes on from its newest checkpoint.") from None
    except RemoteCallError as error:
        raise error.failure.error("a parameter server") from None


class ServedModel:
    """A model on the servers, for the chief.

    Args:
      key: its name there.
      servers: the parameter servers.

    Attributes:
      key: see above.
      generation: which of the chief's states the servers have begun with.
      first_step: how many steps that state had had.
      version_of_chief: the version of the chief's `StateHolder` whose state scheduled functions train; may be assigned.
      key_of_copies: that of the model's newest copies in workers; may be assigned.
    """

    def __init__(self, key: str, servers: Sequence[Handle]):
        self.key = key
        self._servers = list(servers)
        self._partition: Partition | None = None
        self._loaded: Any = self  # the optimizer that the servers have; none yet
        self.generation = 0
        self.version_of_chief = -1
        self.key_of_copies: str | None = None
        self.first_step = self._seed = 0

    def load(self, state: TrainState) -> None:
        """Makes `state` the servers' state.

        Raises:
          ValueError: for an optimizer that cannot work on parts of the parameters.
          ParameterServerLostError: if a server is gone.
        """
        host = jax.device_get(state)
        self._partition = partition = Partition.of(host.params, len(self._servers))
        is_new = self._loaded is not state.optimizer
        if is_new:
            self._loaded = self
            if state.optimizer is not None:
                partition.check(host)
        self.generation += 1
        self.first_step, self._seed = int(host.step), int(host.seed)
        model_state = named_leaves(host.model_state)

        def sent(index: int) -> Callable[[], None]:
            params, opt_state = partition.state_of(host, index)
            return functools.partial(
                self._servers[index].call, "load", self.key, self.generation,
                state.optimizer if is_new else None, params, opt_state, model_state if index == 0 else None,
                host.state_reduction)

        on_each([sent(index) for index in range(len(self._servers))])
        self._loaded = state.optimizer

    def fetch(self, like: TrainState) -> tuple[TrainState, int]:
        """Returns the state that the servers have, and how many updates it has had since it was loaded.

        No update may be under way.

        Args:
          like: a state of the same structure, of arrays or shapes.
        """
        assert self._partition is not None, "it was loaded"
        found = on_each([functools.partial(server.call, "snapshot", self.key) for server in self._servers])
        state = self._partition.joined(like, [params for _, params, _, _ in found], [opt for _, _, opt, _ in found])
        updates = found[0][0]
        return state.replace(model_state=with_leaves(like.model_state, found[0][3]), seed=np.uint32(self._seed),
                             step=np.int32(self.first_step + updates)), updates

    def client(self, shapes: TrainState) -> ModelClient:
        """Returns what workers pull and push with, to be sent to them."""
        assert self._partition is not None, "it was loaded"
        return ModelClient(self.key, tuple(self._servers), self._partition, shapes, self.generation, self.first_step,
                           self._seed)


@dataclasses.dataclass
class ModelClient:
    """A model on the servers, for one worker.

    Attributes:
      key: its name there.
      servers: the parameter servers.
      partition: which of them has what.
      shapes: the state's structure, shapes and dtypes.
      generation: which of the chief's states it trains.
      first_step: how many steps the state had had when it was loaded.
      seed: what random streams derive from.
    """

    key: str
    servers: tuple[Handle, ...]
    partition: Partition
    shapes: TrainState
    generation: int
    first_step: int
    seed: int

    def __post_init__(self) -> None:
        self._pulled: list[Pulled] = []

    def pull(self, number: int | None = None) -> tuple[Any, Any, int]:
        """Returns the parameters, the model state, and the number of updates that they have had.

        Args:
          number: a step in parts, before which they are wanted; `has_pulled` says whether servers still had them. None
            takes them as they are now.
        """
        known: list[Version | None] = [pulled.version for pulled in self._pulled]
        known = known or [None] * len(self.servers)

        answers: list[Pulled] = on_each([functools.partial(server.call, "pull", self.key, version, number)
                                         for server, version in zip(self.servers, known, strict=True)])
        self._pulled = [answer if answer.params is not None else answer._replace(params=self._pulled[index].params)
                        for index, answer in enumerate(answers)]
        params = {name: leaf for pulled in self._pulled for name, leaf in (pulled.params or {}).items()}
        first = self._pulled[0]
        return (with_leaves(self.shapes.params, params), with_leaves(self.shapes.model_state, first.model_state or {}),
                first.version.updates)

    def has_pulled(self, number: int) -> bool:
        """Returns whether what was last pulled is the state before a step, on all servers."""
        return all(pulled.version == Version(self.generation, number) for pulled in self._pulled)

    def push(self, number: int | None, grads: Any, value: Any, model_state: Any) -> int:
        """Sends the outcome of a step on what was last pulled; returns its largest staleness.

        Args:
          number: which step of the state's it is; each is applied once. None applies every one.
          grads: gradients of parameters, nested dicts.
          value: the loss; None without one.
          model_state: the model state after the step.
        """
        return max(staleness or 0 for staleness in on_each(self._pushes(number, grads, value, model_state, None)))

    def push_part(self, number: int, grads: Any, value: Any, model_state: Any, part: BatchPart) -> bool:
        """Sends the outcome of a part of a step's batch; returns whether it counts on server 0.

        Each server takes the parts that come first. Server 0 is sent a part when all others have answered. So, once it
        has the parts that it needs, the others have theirs, too.

        Args:
          number: see `push`; so are the others.
          grads: see `push`.
          value: see `push`.
          model_state: see `push`.
          part: which part it is.
        """
        first, *others = self._pushes(number, grads, value, model_state, part)
        if others:
            on_each(others)
        return on_each([first])[0] is not None

    def _pushes(self, number: int | None, grads: Any, value: Any, model_state: Any,
                part: BatchPart | None) -> list[Callable[[], int | None]]:
        by_name = named_leaves(grads)
        moved = named_leaves(model_state)

        def call(index: int) -> Callable[[], int | None]:
            server, pulled = self.servers[index], self._pulled[index]
            own = {name: np.asarray(leaf) for name, leaf in by_name.items() if name in self.partition.parts[index]}
            states = (moved, pulled.model_state) if index == 0 and pulled.model_state is not None else None
            push = Push(pulled.version, number, own, value, states, part)
            return functools.partial(server.call, "push", self.key, push)

        return [call(index) for index in range(len(self.servers))]
