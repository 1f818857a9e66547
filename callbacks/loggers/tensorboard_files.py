"""Metrics and parameters in event files for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainer.core.errors import missing_package
from trainer.core.files import storage


class TensorBoardFiles:
    """Writes metrics as scalars and the parameters as a table: a single run, whose tags are the names of the metrics.

    The callback `TensorBoard` writes Keras's tags, histograms, profiles and more.

    A resumed run adds a file. TensorBoard ignores the data of earlier files from the first step of the new file on.

    Args:
      log_dir: directory of the files, created if missing, or its URL in an object store. Artifacts are not copied.

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
            raise missing_package("TensorBoardFiles", "tensorboardX", "tensorboard") from error
        self._new_file = EventFile
        self.log_dir = storage.as_place("log_dir", log_dir, "the path of a folder")
        self._file: Any = None
        self._last_step: int | None = None
        self._is_resumed = False

    @property
    def folder(self) -> str:
        """Directory of the files."""
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
        """Does nothing: artifacts are not copied."""

    def finish(self, failed: bool = False) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._last_step, self._is_resumed = None, None, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the last logged step, or None."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the saved step."""
        self._last_step, self._is_resumed = state["last_step"], True

    def _opened(self) -> Any:
        if self._file is None:
            self._file = self._new_file(self.log_dir)
            if self._is_resumed:
                self._file.add_restart(0 if self._last_step is None else self._last_step + 1)
        return self._file


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
