"""Base of loggers for packages that track experiments: a single run, opened at its first use.

Owns the ownership of a run, its continuation after an interruption, and the skipping of values that it already has.
Subclasses open the package's run and send the values.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import Any

from trainer.core import arguments


class Tracker(abc.ABC):
    """Base of loggers that send to a run of another package.

    A given run, or the active run of the program, belongs to the user and stays open. Otherwise the first call creates
    a run, which `finish` ends; the next `fit` creates another run. Until then, files go to the run that has ended.

    A resumed `fit` continues its run. Values that were logged after the save would be repeated; they are skipped if the
    package can report the logged values.

    Subclasses define the methods that begin with an underscore.

    Args:
      run: the package's run to use; None to create a run.
    """

    def __init__(self, run: Any = None):
        self._given = run
        self._run: Any = None
        self._is_own = False
        self._ended: tuple[Any, bool] | None = None  # the run of its own that `finish` ended, and whether it failed
        self._id: str | None = None  # of the run to continue
        self._is_resumed = False
        self._last_steps: Mapping[str, int] = {}

    @property
    def run(self) -> Any:
        """The package's run object, created if missing; after `finish`, the run that it ended."""
        return self._open_run() if self._run is not None or self._ended is None else self._ended[0]

    def _open_run(self) -> Any:
        """Returns the run to send to, created if missing."""
        if self._run is None:
            self._run = self._running() if self._given is None else self._given
            self._is_own = self._run is None
            if self._is_own:
                self._run = self._open(self._id)
            if self._is_resumed and self._id == self._id_of(self._run):
                self._last_steps = self._logged(self._run)
            self._id = self._id_of(self._run)
        return self._run

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends metrics that the run does not have yet."""
        run = self._open_run()
        new = {name: value for name, value in metrics.items() if step > self._last_steps.get(name, -1)}
        if new:
            self._send_metrics(run, new, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Sends parameters, unless a resumed run has them already."""
        run = self._open_run()
        if not self._is_resumed:
            self._send_params(run, params)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Uploads a file: to the open run, or, after `finish`, to the run that it ended, which is then ended again."""
        path = arguments.as_path("path", path)
        name = name or os.path.basename(path)
        if self._run is not None or self._ended is None:
            self._send_artifact(self._open_run(), path, name)
            return
        ended, has_failed = self._ended
        run = self._open(self._id_of(ended))
        try:
            self._send_artifact(run, path, name)
        finally:
            self._close(run, has_failed)

    def finish(self, failed: bool = False) -> None:
        """Ends the run, if the logger has created it."""
        run, is_own = self._run, self._is_own
        if run is not None:
            self._ended = (run, failed) if is_own else None
        self._run, self._is_own, self._id, self._is_resumed, self._last_steps = None, False, None, False, {}
        if run is not None and is_own:
            self._close(run, failed)

    def state_dict(self) -> dict[str, Any]:
        """Returns the package's identifier of the run; None before the run exists."""
        return {"run": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the run with the saved identifier."""
        self._id, self._is_resumed = state["run"], state["run"] is not None
        self._ended = None

    @abc.abstractmethod
    def _open(self, name: str | None) -> Any:
        """Returns a new run, or the run that the package knows by `name`."""

    @abc.abstractmethod
    def _id_of(self, run: Any) -> str:
        """Returns the identifier by which the package finds a run again."""

    def _running(self) -> Any:
        """Returns the active run of the program to use; None if there is none."""
        return None

    def _logged(self, run: Any) -> Mapping[str, int]:
        """Returns the last step of each metric of a run, as far as the package reports it."""
        return {}

    @abc.abstractmethod
    def _send_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None: ...

    @abc.abstractmethod
    def _send_params(self, run: Any, params: Mapping[str, Any]) -> None: ...

    @abc.abstractmethod
    def _send_artifact(self, run: Any, path: str, name: str) -> None: ...

    @abc.abstractmethod
    def _close(self, run: Any, failed: bool) -> None: ...
