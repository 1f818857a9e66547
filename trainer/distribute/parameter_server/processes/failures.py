"""Failures between processes, and exceptions from other processes."""

from __future__ import annotations

import builtins
import sys
import traceback
from types import TracebackType
from typing import NamedTuple

from trainer.distribute.cluster import PEER_LOST

EXIT_CODE = PEER_LOST  # of a script that ends because a server is lost

# Most need more than a message; the first two would end the loop or the generator that fetches a result, silently.
_NOT_RAISED_HERE = (StopIteration, StopAsyncIteration, OSError, UnicodeError, BaseExceptionGroup)


class ParameterServerLostError(RuntimeError):
    """A parameter server is lost, and with it a part of the parameters.

    There is no recovery in the same process: unless this is caught, the script ends with exit code 75, and the same
    command continues from the newest checkpoint of `BackupAndRestore`.
    """


class WorkerLostError(RuntimeError):
    """Workers were lost and cannot be replaced, or a function has ended every worker that ran it."""


class ProcessLostError(ConnectionError):
    """A process of the cluster has ended or cannot be reached. Users do not see this error."""


class RemoteFailure(NamedTuple):
    """An exception of another process as texts, because its class may be unknown here."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Returns the failure for an exception."""
        try:
            message = str(error)
        except Exception as other:  # the class may be the user's
            message = f"(no message: {type(other).__name__})"
        return cls(type(error).__name__, message, "".join(traceback.format_exception(error)))

    def error(self, name: str) -> BaseException:
        """Returns an exception to raise, of the same class if built in; `name` is its origin in the message.

        It is a RuntimeError for other classes, and for classes that mean something to Python where they are raised.
        """
        if self.kind == ParameterServerLostError.__name__:
            return ParameterServerLostError(self.message)
        known = getattr(builtins, self.kind, None)
        message = f"{self.message}\n\n{name} raised {self.kind}:\n{self.traceback}"
        if isinstance(known, type) and issubclass(known, Exception) and not issubclass(
                known, _NOT_RAISED_HERE):
            return known(message)
        return RuntimeError(f"{self.kind}: {message}")


def exit_with_code_of_lost_server() -> None:
    """Makes an uncaught `ParameterServerLostError` end the interpreter with `EXIT_CODE`."""
    if getattr(sys.excepthook, "exits_for_lost_server", False):
        return
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if issubclass(kind, ParameterServerLostError):
            sys.stderr.flush()
            raise SystemExit(EXIT_CODE)

    hook.exits_for_lost_server = True  # type: ignore[attr-defined]
    sys.excepthook = hook
