"""The protocol of loggers, which take the metrics, parameters and files of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Protocol of the destinations of `LogTo`: define these four methods, without a base class.

    They are called in the first process only, one at a time: first `log_params`, then any other method, finally
    `finish`. A second `fit` with the same logger begins again.

    Example:

    >>> class Printer:
    ...     def log_metrics(self, metrics, step):
    ...         print(step, metrics)
    ...     def log_params(self, params):
    ...         print(params)
    ...     def log_artifact(self, path, name=None):
    ...         print(name or path)
    ...     def finish(self, failed=False):
    ...         print("failed" if failed else "finished")
    >>> isinstance(Printer(), Logger)
    True
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes numbers by name, at a step; a step may occur more than once."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Takes the settings of the run: texts, numbers, bools and None by name."""

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Takes a file, under its own name or another name."""

    def finish(self, failed: bool = False) -> None:
        """Writes all pending data and ends the run; `failed` is True after an exception."""


@runtime_checkable
class ResumableLogger(Logger, Protocol):
    """A logger that continues where an interrupted run was saved."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that `load_state_dict` needs, with checkpointable values (see `Callback.state_dict`)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`, before any other call: later values are logged again."""
