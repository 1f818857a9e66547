"""A log file with a JSON object on each line."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any, BinaryIO

from trainer.core import arguments
from trainer.core.files import open_log, storage


class JSONLines:
    """Writes a JSON object on its own line for each call: parameters, metrics and artifacts.

    Metrics are written as `{"step": 3, "loss": 0.5}`; parameters as `{"params": {...}}`, the first line; an artifact as
    `{"artifact": name, "path": path}`, without a copy of its file. NaN and infinity, which JSON cannot represent, are
    written as null. Each line is on disk at once.

    A new run replaces the file, including lines of an earlier `fit`, unless `append=True`. A resumed run keeps exactly
    the lines that the file had when the run was saved.

    Args:
      path: path of the file, such as "runs/first/log.jsonl"; its folder is created if missing. A link is followed to
        its target. Or its URL in an object store, to which the whole file is written with each line.
      append: True to keep the lines of an existing file and add the lines of this run, starting with its parameters;
        False to replace them. Lines of a run that restarts before its first checkpoint are kept too.

    Raises:
      IsADirectoryError: if the path is a folder.
      ValueError: if the path is something other than a regular file.
      OSError: from the methods, if the file cannot be written.

    Example:

    >>> import pathlib
    >>> log = JSONLines("run/log.jsonl")
    >>> log.log_params({"optimizer": "adam"})
    >>> log.log_metrics({"loss": 0.5}, step=0)
    >>> log.finish()
    >>> print(pathlib.Path("run/log.jsonl").read_text())
    {"params": {"optimizer": "adam"}}
    {"step": 0, "loss": 0.5}
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False):
        self.path = _as_file_path(path)
        arguments.require_bool(append=append)
        self.append = append
        self._end: int | None = None  # bytes that are kept when the file is opened; None: all to append, none otherwise
        self._is_begun = self._has_params = False
        self._log: Any = None  # of an object store, where each line writes the whole file

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_log": None}

    @property
    def folder(self) -> str:
        """Folder of the file."""
        return os.path.dirname(self.path) or os.curdir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes a line with the metrics."""
        self._write({"step": step, **metrics})

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Writes a line with the parameters, unless a resumed run has it already."""
        if not self._has_params:
            self._write({"params": dict(params)})
            self._has_params = True

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Writes a line with the path of the artifact."""
        path = arguments.as_path("path", path)
        self._write({"artifact": name or os.path.basename(path), "path": os.path.abspath(path)})

    def finish(self, failed: bool = False) -> None:
        """Ends the run, so that the next run can begin."""
        self._end, self._is_begun, self._has_params, self._log = None, False, False, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the length of the file in bytes."""
        return {"end": self._end_now()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the saved length; the next line cuts off the rest."""
        self._end, self._is_begun, self._has_params = state["end"], False, state["end"] > 0

    def _end_now(self) -> int:
        if self._end is None:
            self._end = storage.size(self.path) if self.append and storage.exists(self.path) else 0
        return self._end

    def _write(self, value: Mapping[str, Any]) -> None:
        if storage.is_remote(self.path):
            self._write_to_store(_line_of(value))
            return
        if not self._is_begun:
            _make_ready(self.path)
            end = self._end_now()
            with open(self.path, "a+b") as file:
                file.truncate(min(end, file.tell()))
                _end_line(file)
            self._is_begun = True
        with open(self.path, "ab") as file:
            file.write(_line_of(value))
            self._end = file.tell()

    def _write_to_store(self, line: bytes) -> None:
        if not self._is_begun:
            end = self._end_now()
            self._log = open_log(self.path)
            self._log.truncate(min(end, self._log.tell()))
            _end_line(self._log)
            self._is_begun = True
        self._log.write(line)
        self._log.flush()
        self._end = self._log.tell()


def _line_of(value: Mapping[str, Any]) -> bytes:
    return (json.dumps({name: _without_nan(item) for name, item in value.items()}, default=str) + "\n").encode()


def _as_file_path(value: object) -> str:
    """Returns the path of an existing or new file as a string."""
    path = storage.as_file("path", value)
    if not storage.is_remote(path) and os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"`path` must be the path of a regular file, which can be cut. Received: {path!r}, which is "
                         "none.")
    return path


def _make_ready(path: str) -> None:
    """Creates the folder of a file, and raises OSError if the file is not writable."""
    _as_file_path(path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"The log {path!r} cannot be written to its folder ({error.strerror}). Give a "
                          "path in a folder that can be made and written", folder) from error
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "The log cannot be written (Permission denied). Give another path", path)


def _end_line(file: BinaryIO) -> None:
    """Ends the last line of a file, which a killed process may have cut."""
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _without_nan(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
