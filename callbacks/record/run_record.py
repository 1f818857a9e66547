"""The record of a run, `run.json`."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.callbacks.base.log_values import as_json
from trainer.callbacks.base.run_protocol import run_detail
from trainer.callbacks.record.environment import environment, peak_memory
from trainer.core.errors import wrong_type
from trainer.core.files import read_json, replace_file, storage
from trainer.core.types import Phase

FILE_NAME = "run.json"
FORMAT = 1
MIN_SECS_BETWEEN_WRITES = 5.0

LOGGER = logging.getLogger(__name__)


class RunRecord(Callback):
    """Keeps a file `run.json` in a folder, with the settings, the environment and the course of the run.

    The file has the versions of the trainer, JAX and related packages, the command and the commit of the script's
    folder, the devices and the strategy, the seed, the arguments of `compile` and `fit`, a fingerprint of the data, the
    timing and the history. It is written after the first step, after epochs, at most every five seconds, and at the
    end. `trainer.report(folder)` turns it into a page.

    `fit` keeps this file by itself in the folder of `BackupAndRestore`, of `TensorBoard` and of `LogTo` (see
    `Callback.run_folder`). Errors of this callback are logged and end no training. With several processes, the first
    process writes.

    Args:
      folder: folder of the file, created if missing.
      config: settings of the program around the run, as plain data, which are kept under "config".

    Raises:
      TypeError: if `folder` is not a path, or `config` not a dict.

    Example:

    >>> import json, pathlib
    >>> import numpy as np, trainer
    >>> from flax import linen as nn
    >>> model = trainer.Model(nn.Dense(1))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[RunRecord("run")])
    >>> record = json.loads(pathlib.Path("run/run.json").read_text())
    >>> record["status"], record["compile"]["loss"], len(record["history"]["loss"])
    ('finished', 'mse', 1)
    """

    runs_on = "chief"
    stops_consistently = True

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, object] | None = None):
        self.folder = storage.absolute(storage.as_place("folder", folder, "the path of a folder"))
        if config is not None and not isinstance(config, Mapping):
            raise wrong_type("config", config, "a dict of plain data, or None")
        self.config = config
        self._record: dict[str, Any] | None = None
        self._is_written = False
        self._written_at = 0.0

    @property
    def path(self) -> str:
        """Path of the file."""
        return os.path.join(self.folder, FILE_NAME)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._record, self._is_written = None, False
        with _unharmed("describe the run"):
            self._record = {"format": FORMAT, "status": "running", "begin": _now(), "end": None,
                            "model": {"name": self.model.name}, **run_detail(self.model, "description", dict)(),
                            **({} if self.config is None else {"config": dict(self.config)})}

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        if self._record is not None and not self._is_written and phase == "train":
            # Not earlier: a resumed run may still be refused, and the folder then belongs to another run.
            with _unharmed("be written"):
                is_resumed = bool(getattr(self.model.history, "epoch", ()))
                self._record |= {**environment(), "earlier": _earlier(self.path) if is_resumed else []}
                storage.make_folder(self.folder)
                self._write(self._record)
            self._is_written = True

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if time.monotonic() - self._written_at >= MIN_SECS_BETWEEN_WRITES:
            self._update("running")

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._update("finished")
        self._record = None

    def release(self) -> None:
        error = sys.exc_info()[1]
        if self._record is not None and error is not None:
            self._record["error"] = f"{type(error).__name__}: {error}"
        self._update("failed" if isinstance(error, Exception) else "interrupted")
        self._record = None

    def _update(self, status: str) -> None:
        # `BackupAndRestore` may have deleted the folder.
        if self._record is None or not self._is_written or not storage.is_folder(self.folder):
            return
        with _unharmed("be written"):
            timing, history = run_detail(self.model, "timing"), getattr(self.model, "history", None)
            self._write(self._record | {
                "status": status, "end": _now(), "timing": dict(timing.report()) if timing is not None else {},
                "epochs": list(getattr(history, "epoch", ())), "history": dict(getattr(history, "history", {})),
                "epochs_of": _epochs_of(history),
                "peak_memory": peak_memory(),
                "train_step_flops": run_detail(self.model, "train_step_flops", lambda: None)()})

    def _write(self, record: Mapping[str, Any]) -> None:
        replace_file(self.path, json.dumps(as_json(record), indent=1))
        self._written_at = time.monotonic()


@contextlib.contextmanager
def _unharmed(what: str) -> Any:
    try:
        yield
    except Exception as error:
        LOGGER.warning("%s could not %s: %s: %s", FILE_NAME, what, type(error).__name__, error)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _epochs_of(history: Any) -> dict[str, list[int]]:
    """Returns the epochs of the logs that some epochs lack."""
    every = list(getattr(history, "epoch", ()))
    found = {log: history.epochs_of(log) for log in getattr(history, "history", {})}
    return {log: epochs for log, epochs in found.items() if epochs != every}


def _earlier(path: str) -> list[Any]:
    """Returns the times of an interrupted run from its file, after the times of the runs before it."""
    try:
        record = read_json(path, os.path.dirname(path))
        last = {name: record.get(name) for name in ("status", "begin", "end", "timing")}
        if last["status"] == "running":  # its process did not come to write another
            last["status"] = "killed"
        return [*map(dict, record["earlier"]), last]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
