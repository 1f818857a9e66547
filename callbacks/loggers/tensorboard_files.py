"""Metrics and parameters in event files, which TensorBoard shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer.core import arguments


class TensorBoardFiles:
    """Writes metrics as scalars and the parameters as a table: one run, with the metrics' own names as tags.

    The callback `TensorBoard` is the one with Keras's tags, histograms, profiles and the rest.

    A run that resumes adds a file. From its first step on, TensorBoard leaves out what the files before it have.

    Args:
      log_dir: the directory, which is made if it does not exist. Artifacts stay where they are.

    Raises:
      ImportError: if tensorboardX is not installed.
      OSError: from the methods, if a file cannot be written.

    Example:

    >>> import os
    >>> log = TensorBoardFiles("run/first")
    >>> log.log_metrics({"loss": 0.5}, step=0)
    >>> log.finish()
    >>> len(os.listdir("run/first"))
    1
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        try:
            from trainer.callbacks.tensorboard.event_file import EventFile
        except ImportError as error:
            raise ImportError("`TensorBoardFiles` needs tensorboardX, which cannot be imported. Install it with "
                              "`pip install 'trainer-jax[tensorboard]'`.") from error
        self._new_file = EventFile
        self.log_dir = arguments.as_path("log_dir", log_dir, "the path of a folder")
        self._file: Any = None
        self._last_step: int | None = None
        self._is_resumed = False

    @property
    def folder(self) -> str:
        """The directory."""
        return self.log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds scalars."""
        file = self._opened()
        for name, value in metrics.items():
            file.add_scalar(name, value, step)
        file.flush()
        self._last_step = step if self._last_step is None else max(step, self._last_step)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Adds a table, as the text "params"."""
        if not self._is_resumed:
            rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in params.items())
            self._opened().add_text("params", f"| parameter | value |\n|---|---|\n{rows}", step=0)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Does nothing: the artifact stays where it is."""

    def finish(self, failed: bool = False) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._last_step, self._is_resumed = None, None, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the last step that was logged; None if there is none."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after that step."""
        self._last_step, self._is_resumed = state["last_step"], True

    def _opened(self) -> Any:
        if self._file is None:
            self._file = self._new_file(self.log_dir)
            if self._is_resumed:
                self._file.add_restart(0 if self._last_step is None else self._last_step + 1)
        return self._file


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
