"""What the parts of a cluster need of whatever starts its processes: local processes, or Ray."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Protocol

from trainer.distribute.parameter_server.processes.failures import RemoteFailure
from trainer.distribute.parameter_server.processes.host import RAISED
from trainer.distribute.parameter_server.processes.wire import Packed, pack, unpack


class Handle(abc.ABC):
    """A process of the cluster, as other processes hold it. It can be sent to them."""

    name: str

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Returns what a method of the process's object returns.

        Args:
          method: the method.
          *arguments: its arguments.
          timeout: seconds; None waits as long as the process lives.

        Raises:
          ProcessLostError: if the process ends before, or is not reached.
          TimeoutError: if it does not answer in time.
          RemoteCallError: if the method raises.
        """
        return self.call_packed(method, pack(arguments)[0], timeout)

    def call_packed(self, method: str, packed: Packed, timeout: float | None = None) -> Any:
        """Returns what `call` does, for arguments that are packed already."""
        kind, answer = self._answer(method, packed, timeout)
        if kind == RAISED:
            raise RemoteCallError(unpack(answer))
        return unpack(answer)

    @abc.abstractmethod
    def _answer(self, method: str, packed: Packed, timeout: float | None) -> tuple[str, Packed]:
        """Returns what the process's `Host` answers."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends the process at once."""


class Engine(Protocol):
    """Starts the processes of a cluster."""

    def start(self, name: str, role: str, make: Callable[[], Any]) -> Handle:
        """Starts a process and returns at once.

        Args:
          name: what messages call it, such as "worker 1".
          role: "worker" or "ps".
          make: returns the object that the process is there for; it is called in it.
        """

    def close(self, code: int = 0) -> None:
        """Ends all processes, and removes what they have left.

        Args:
          code: the exit code of scripts that only serve.
        """


class RemoteCallError(Exception):
    """A method of another process's object has raised.

    Attributes:
      failure: the exception.
    """

    def __init__(self, failure: RemoteFailure):
        super().__init__(failure.message)
        self.failure = failure
