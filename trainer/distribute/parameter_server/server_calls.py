"""Calls of all parameter servers at the same time, and what becomes of them when a server is lost."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import TypeVar

from trainer.distribute.parameter_server.processes.engine import RemoteCallError
from trainer.distribute.parameter_server.processes.failures import ParameterServerLostError, ProcessLostError

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
