"""Concurrent calls of all parameter servers, and their errors when a server is lost."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Sequence
from typing import Any

from trainer.distribute.parameter_server.processes.engine import Handle, RemoteCallError
from trainer.distribute.parameter_server.processes.failures import ParameterServerLostError, ProcessLostError


def call_each(
    servers: Sequence[Handle], method: str, *common: Any, each: Sequence[tuple[Any, ...]] | None = None
) -> list[Any]:
    """Calls a method of servers concurrently, with common and separate arguments, and returns the answers in order.

    Raises:
      ParameterServerLostError: if a server is lost.
    """
    arguments = [(*common, *own) for own in each or [()] * len(servers)]
    if len(servers) == 1:
        return [_call(servers[0], method, arguments[0])]
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as threads:
        return list(threads.map(_call, servers, itertools.repeat(method), arguments))


def _call(server: Handle, method: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return server.call(method, *arguments)
    except ProcessLostError as error:
        raise ParameterServerLostError(
            f"{error} The parameters that it held are gone. Start the same command again: with "
            "`callbacks.BackupAndRestore`, `fit` goes on from its newest checkpoint.") from None
    except RemoteCallError as error:
        raise error.failure.error("a parameter server") from None
