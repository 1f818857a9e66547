"""Interface of an engine that starts the processes of a cluster, local processes or Ray, and both ends of a call.

A call arrives as bytes at the `Host` of a process, and its result or exception leaves as bytes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Protocol

from trainer.distribute.parameter_server.processes.failures import RemoteFailure
from trainer.distribute.parameter_server.processes.wire import Packed, pack, unpack

RETURNED, RAISED = "returned", "raised"


class Handle(abc.ABC):
    """A handle on a process of the cluster for other processes. It can be sent to them."""

    name: str

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Returns the result of a method of the process's object.

        Args:
          method: name of the method.
          *arguments: its arguments.
          timeout: seconds; None waits as long as the process lives.

        Raises:
          ProcessLostError: if the process ends first, or cannot be reached.
          TimeoutError: if it does not answer in time.
          RemoteCallError: if the method raises.
        """
        return self.call_packed(method, pack(arguments)[0], timeout)

    def call_packed(self, method: str, packed: Packed, timeout: float | None = None) -> Any:
        """Returns the result of `call` for packed arguments.

        Raises:
          UnreadableResultError: if the result cannot be unpickled in this process.
        """
        kind, answer = self._answer(method, packed, timeout)
        if kind == RAISED:
            raise RemoteCallError(unpack(answer))
        try:
            return unpack(answer)
        except Exception as error:
            raise UnreadableResultError(f"{type(error).__name__}: {error}") from error

    @abc.abstractmethod
    def _answer(self, method: str, packed: Packed, timeout: float | None) -> tuple[str, Packed]:
        """Returns the answer of the process's `Host`."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends the process at once."""


class Host:
    """Holds a `Worker` or a `ParameterServer`, made by a packed function, and calls it."""

    def __init__(self, make: Packed):
        self._served: Any = unpack(make)()

    def answer(self, method: str, arguments: Packed) -> tuple[str, Packed]:
        """Returns `RETURNED` and the result of a method with packed arguments, or `RAISED` and its `RemoteFailure`."""
        # BaseException, because a function that exits must not end the process, as if it had crashed.
        try:
            returned = getattr(self._served, method)(*unpack(arguments, getattr(self._served, "resource", None)))
            return RETURNED, pack(returned)[0]
        except BaseException as error:
            return RAISED, pack(RemoteFailure.of(error))[0]


class Engine(Protocol):
    """Starts the processes of a cluster."""

    def start(self, name: str, role: str, make: Callable[[], Any]) -> Handle:
        """Starts a process and returns at once.

        Args:
          name: name in messages, such as "worker 1".
          role: "worker" or "ps".
          make: returns the object of the process; it is called in the process.
        """

    def close(self, code: int = 0) -> None:
        """Ends all processes, and removes their files.

        Args:
          code: the exit code of scripts that only serve.
        """


class UnreadableResultError(Exception):
    """Raised when a result of another process cannot be unpickled; the message is the reason."""


class RemoteCallError(Exception):
    """Raised when a method of another process's object raises `failure`."""

    def __init__(self, failure: RemoteFailure):
        super().__init__(failure.message)
        self.failure = failure
