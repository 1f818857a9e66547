"""Log lines of an estimator, and event files for TensorBoard."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from trainer.callbacks import Callback
from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.run_protocol import SavePoint
from trainer.core.types import Phase

LOGGER = logging.getLogger(".".join(__name__.split(".")[:2]))  # the package's logger, so that users can set its level


class _ToStderr(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which a notebook or a test may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


# As in TensorFlow, visible by default, and printed once even if the root logger has handlers.
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False
LOGGER.addHandler(_ToStderr())


class TrainingLog(Callback):
    """Logs the loss and the speed periodically, and writes the loss for TensorBoard.

    Args:
      model_dir: folder of the event file.
      log_steps: number of steps between log lines; None disables them.
      summary_steps: number of steps between TensorBoard summaries; None disables them.
      writes: whether this process writes. All processes use the same steps, because they run the same batches together.
    """

    def __init__(self, model_dir: str, log_steps: int | None, summary_steps: int | None, writes: bool):
        self._model_dir, self._writes = model_dir, writes
        self._log_steps, self._summary_steps = log_steps, summary_steps
        self._file: Any = None
        self._logged: tuple[int, float, float] | None = None  # step of this call, sum of its losses, seconds
        self._summed_at: tuple[int, float] | None = None
        self._first = 0  # global step before the call

    def on_save_point(self, point: SavePoint) -> None:
        if point.kind == "start":
            self._first = point.batches - point.batch
            self._logged = self._summed_at = None

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        steps = [each for each in (self._log_steps, self._summary_steps) if each]
        if phase != "train" or not steps:
            return None
        return batch + min(-(self._first + batch + 1) % each for each in steps)

    def on_execution_end(self, phase: Phase, batch: int, logs: Any = None) -> None:
        if phase != "train":
            return
        done, step = batch + 1, self._first + batch + 1
        now = time.monotonic()
        is_logged = self._log_steps is not None and step % self._log_steps == 0
        is_written = self._summary_steps is not None and step % self._summary_steps == 0
        if not (is_logged or is_written) or "loss" not in (logs or {}):
            return
        total = float(logs["loss"]) * done  # the mean since the call began
        if is_logged:
            before = self._logged or (0, 0.0, now)
            secs, steps = now - before[2], done - before[0]
            loss = (total - before[1]) / steps
            speed = "" if self._logged is None else f", {steps / max(secs, 1e-9):.5g} steps/sec"
            level = logging.INFO if self._writes else logging.DEBUG
            LOGGER.log(level, "step %d: loss = %.6g, the mean of %d steps%s", step, loss, steps, speed)
            self._logged = (done, total, now)
        if is_written:
            before_sum = self._summed_at or (0, 0.0)
            self._write("loss", (total - before_sum[1]) / (done - before_sum[0]), step)
            self._summed_at = (done, total)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.release()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, tag: str, value: float, step: int) -> None:
        self._file = self._file or (event_file(self._model_dir) if self._writes else None)
        if self._file is not None:
            self._file.add_scalar(tag, value, step)


def event_file(directory: str) -> Any:
    """Returns a new event file; None without tensorboardX, which `pip install '.[tensorboard]'` installs."""
    try:
        from trainer.callbacks.tensorboard.event_file import EventFile
    except ImportError:
        return None
    return EventFile(directory)


def write_evaluation(directory: str, logs: Mapping[str, float], step: int) -> None:
    """Writes the logs of an evaluation to an event file in a folder."""
    os.makedirs(directory, exist_ok=True)
    file = event_file(directory)
    if file is None:
        return
    for name, value in logs.items():
        file.add_scalar(name, float(value), step)
    file.close()
