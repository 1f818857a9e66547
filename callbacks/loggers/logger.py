"""What a logger is: anything that takes metrics, parameters and files of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Takes what `LogTo` sends: subclass nothing, and define these four methods.

    They are called in the first process alone, one at a time: first `log_params`, then any of the others, at last
    `finish`. A logger that is used by a second `fit` begins again.

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
        """Takes numbers by name, at a place on the axis of steps; a step may come more than once."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Takes what the run was started with: texts, numbers, bools and None by name."""

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Takes a file, under its own name or another."""

    def finish(self, failed: bool = False) -> None:
        """Sees to it that all is written, and ends the run; `failed` if it ended by an exception."""


@runtime_checkable
class ResumableLogger(Logger, Protocol):
    """A logger that goes on where an interrupted run was saved."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs, as a checkpoint can hold it (see `Callback.state_dict`)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of `state_dict`, before anything else is called: what came after it comes again."""
