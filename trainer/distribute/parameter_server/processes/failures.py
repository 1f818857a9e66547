"""What goes wrong between processes, and how an error of another process is raised here."""

from __future__ import annotations

import builtins
import sys
import traceback
from types import TracebackType
from typing import NamedTuple

from trainer.cluster import PEER_LOST

EXIT_CODE = PEER_LOST  # of a script that a lost server has ended


class ParameterServerLostError(RuntimeError):
    """A parameter server is gone, and with it a part of the parameters.

    There is no recovery in the same process: the script ends with exit code 75, unless it catches this, and the same
    command goes on from the newest checkpoint of `BackupAndRestore`.
    """


class WorkerLostError(RuntimeError):
    """Workers were lost that cannot be replaced, or a function has ended every worker that ran it."""


class ProcessLostError(ConnectionError):
    """A process of the cluster has ended, or is not reached. Not seen by users."""


class RemoteFailure(NamedTuple):
    """An exception of another process, as text: the exception itself may not be known here.

    Attributes:
      kind: the name of its class.
      message: its message.
      traceback: where it was raised.
    """

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Returns what to send of an exception."""
        try:
            message = str(error)
        except Exception as other:  # its class is the user's
            message = f"(no message: {type(other).__name__})"
        return cls(type(error).__name__, message, "".join(traceback.format_exception(error)))

    def error(self, name: str) -> BaseException:
        """Returns the exception to raise for it: of the same class, if that is built in.

        Args:
          name: what has raised it, such as "`train_step` on worker 1".
        """
        if self.kind == ParameterServerLostError.__name__:
            return ParameterServerLostError(self.message)
        known = getattr(builtins, self.kind, None)
        message = f"{self.message}\n\n{name} raised {self.kind}:\n{self.traceback}"
        if isinstance(known, type) and issubclass(known, Exception) and not issubclass(
                known, (OSError, UnicodeError, BaseExceptionGroup)):  # which are made of more than a message
            return known(message)
        return RuntimeError(f"{self.kind}: {message}")


def exit_with_code_of_lost_server() -> None:
    """Makes the interpreter end with `EXIT_CODE`, if it ends by a `ParameterServerLostError` that nothing caught."""
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
