"""What the loggers of packages that track experiments share: one run, which is opened when it is first used.

Owns whose a run is, how it goes on after an interruption, and which values it has already. What a package calls a run,
and how it takes values, is its subclass's business.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import Any


class Tracker(abc.ABC):
    """Base of loggers that send to a run of another package.

    A run that was given, or that the program has open already, is the user's: it stays open. Any other is made at the
    first call, and ended by `finish`; the next `fit` then makes another.

    A `fit` that resumes goes on with the run that it had. Values that were logged after it was saved, and would come
    again, are left out where the package can tell what a run has.

    A subclass defines the methods that begin with an underscore.

    Args:
      run: the package's run to use; None for one of the logger's own.
    """

    def __init__(self, run: Any = None):
        self._given = run
        self._run: Any = None
        self._is_own = False
        self._id: str | None = None  # of the run to go on with
        self._is_resumed = False
        self._last_steps: Mapping[str, int] = {}

    @property
    def run(self) -> Any:
        """The package's own object, which is made if there is none yet."""
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
        """Sends metrics, but for those that the run has already."""
        run = self.run
        new = {name: value for name, value in metrics.items() if step > self._last_steps.get(name, -1)}
        if new:
            self._send_metrics(run, new, step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Sends parameters, unless a run that goes on has them already."""
        run = self.run
        if not self._is_resumed:
            self._send_params(run, params)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Uploads a file."""
        path = os.fspath(path)
        self._send_artifact(self.run, path, name or os.path.basename(path))

    def finish(self, failed: bool = False) -> None:
        """Ends the run, if it is the logger's own."""
        run, is_own = self._run, self._is_own
        self._run, self._is_own, self._id, self._is_resumed, self._last_steps = None, False, None, False, {}
        if run is not None and is_own:
            self._close(run, failed)

    def state_dict(self) -> dict[str, Any]:
        """Returns the name that the package has for the run; None before there is one."""
        return {"run": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the run of that name."""
        self._id, self._is_resumed = state["run"], state["run"] is not None

    @abc.abstractmethod
    def _open(self, name: str | None) -> Any:
        """Returns a run of the logger's own: a new one, or the one that the package knows by `name`."""

    @abc.abstractmethod
    def _id_of(self, run: Any) -> str:
        """Returns the name by which the package finds a run again."""

    def _running(self) -> Any:
        """Returns the run that the program has open and that is to be used; None if there is none."""
        return None

    def _logged(self, run: Any) -> Mapping[str, int]:
        """Returns the last step of each metric that a run has, as far as the package tells."""
        return {}

    @abc.abstractmethod
    def _send_metrics(self, run: Any, metrics: Mapping[str, float], step: int) -> None: ...

    @abc.abstractmethod
    def _send_params(self, run: Any, params: Mapping[str, Any]) -> None: ...

    @abc.abstractmethod
    def _send_artifact(self, run: Any, path: str, name: str) -> None: ...

    @abc.abstractmethod
    def _close(self, run: Any, failed: bool) -> None: ...


def missing_package(logger: str, package: str) -> ImportError:
    """Returns the error for a package that cannot be imported, and is in the extra of the same name."""
    return ImportError(f"`{logger}` needs {package}, which cannot be imported. Install it with "
                       f"`pip install 'trainer-jax[{package}]'`.")
