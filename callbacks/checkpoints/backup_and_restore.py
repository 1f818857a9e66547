"""Checkpoints of a run, which resume it after an interruption."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import signal
import threading
import time
from typing import Any, Literal

import jax

from trainer.callbacks.base.callback import Callback, Logs
from trainer.callbacks.base.run_protocol import SavePoint
from trainer.callbacks.record.run_record import FILE_NAME as RECORD_NAME
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.files import storage
from trainer.core.types import Phase

LOGGER = logging.getLogger(__name__)

PREEMPTED_EXIT_CODE = 143  # as a shell reports a process that SIGTERM ended


class BackupAndRestore(Callback):
    """Saves checkpoints of a run, so that the same command resumes it after an interruption.

    A checkpoint holds the weights, the optimizer, the position in the data, the metrics of the epoch so far, the
    history and the state of every callback. If the folder has a checkpoint when `fit` begins, the run continues from
    the newest complete checkpoint. Data other than arrays, `Dataset` or Grain's are read again from their beginning up
    to that position. On CPUs the results equal an uninterrupted run bit for bit. On GPUs kernels may sum in a different
    order in each run, unless the model was compiled with `compile(deterministic=True)`; docs/resume.md lists the
    guarantees by platform. After `TerminateOnNaN` has found a NaN loss, nothing is saved, not even at the end.

    Args:
      backup_dir: folder for this run alone, or its URL in an object store, such as "s3://bucket/run".
      save_freq: "epoch" to save after each epoch, a number of batches, counted over the epochs, or a
        `datetime.timedelta`.
      double_checkpoint: whether to keep the checkpoint before the newest too, in case the newest gets damaged.
      delete_checkpoint: whether to delete the checkpoints at the end of the training. If False, the end is saved,
        regardless of `save_freq`.
      save_on_error: whether to save the run also when an exception ends it, in its state after the last batch that all
        callbacks have seen. Ctrl-C then ends the run at the next boundary of batches; a second Ctrl-C ends it at once.
        If a step fails on the device, or a callback fails after a batch, only earlier checkpoints remain, and a warning
        says so. For a single process only.
      preemption_signal: signal on which the run saves at the next boundary of batches and ends the process with exit
        code 143; None for no signal. Several processes agree on the boundary, and support SIGTERM only, which may reach
        a single process.

    Raises:
      ValueError: for an empty `backup_dir` or an unknown `save_freq`; from `fit`, if the folder has checkpoints but no
        complete checkpoint, or checkpoints of another run.
      OSError: from `fit`, if a checkpoint cannot be written. Earlier checkpoints remain.

    Example:

    >>> backup = BackupAndRestore("runs/first", save_freq=1000)
    >>> history = model.fit(x, y, epochs=100, callbacks=[backup])  # doctest: +SKIP
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int | datetime.timedelta = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
        preemption_signal: signal.Signals | int | None = signal.SIGTERM,
        *,
        save_on_error: bool = False,
    ):
        arguments.require_bool(double_checkpoint=double_checkpoint, delete_checkpoint=delete_checkpoint,
                               save_on_error=save_on_error)
        self.backup_dir = storage.as_place("backup_dir", backup_dir, "the path of a folder for the checkpoints")
        self.save_freq = _checked_save_freq(save_freq)
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.save_on_error = save_on_error
        self.preemption_signal = None if preemption_signal is None else _checked_signal(preemption_signal)
        self._folder = self.backup_dir
        self._saved_at = 0.0
        self._point: Any = None
        self._is_preempted = self._is_interrupted = False
        self._boundaries = 0
        self._outer_handlers: dict[int, Any] = {}

    @property
    def run_folder(self) -> str | None:  # type: ignore[override]
        """Folder of the checkpoints."""
        return self.backup_dir

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._saved_at = time.monotonic()
        self._is_preempted = self._is_interrupted = False

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        if phase != "train" or not isinstance(self.save_freq, int):
            return None
        return batch + -(self._point.batches + 1) % self.save_freq

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_point": None}  # of a run, with its model

    def on_save_point(self, point: SavePoint) -> None:
        if point.kind == "start":
            if jax.process_count() > 1:
                self._check_for_several_processes()
            self._point = point
            self._folder = storage.absolute(self.backup_dir)  # wherever a callback may change to
            resumed = self._restore(point)
            if resumed and jax.process_index() == 0:
                if (self.params or {}).get("verbose"):
                    print_message(resumed)
                else:
                    LOGGER.info(resumed)
            self._listen()
            return
        if point.kind == "error":
            if self.save_on_error and self._save(point, wait=True):
                LOGGER.warning("The run is saved in %r, as it was before the exception. The same command goes on from "
                               "there.", self.backup_dir)
            return
        if self._is_interrupted:
            raise KeyboardInterrupt  # which saves
        if self._is_preempted_everywhere():
            self._save_and_exit()
        if self._is_due(point):
            self._save(point)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._stop_listening()
        if self._is_interrupted:
            raise KeyboardInterrupt
        if self._point.is_at_limit:  # the run is not over, and saved already
            self._point.wait()
            return
        if self._is_preempted:  # after the last boundary; without its end saved, the next start would begin again
            self._save_and_exit()
        self._point.wait()
        if self.delete_checkpoint:
            if self.run_folder is not None and jax.process_index() == 0:
                with contextlib.suppress(OSError):
                    storage.remove(os.path.join(self._folder, RECORD_NAME))
            self._point.delete(self._folder)

    def _restore(self, point: SavePoint) -> str | None:
        """Restores the run; returns a sentence that describes its position, or None if the run begins."""
        return point.restore(self._folder)

    def _is_due(self, point: SavePoint) -> bool:
        if point.is_at_limit:
            return point.kind == "batches"
        if point.kind == "epoch" and not self.delete_checkpoint and (
                self.model.stop_training or point.epoch >= (self.params or {}).get("epochs", math.inf)):
            return True  # the end, for which a `SidecarEvaluator` of the run waits
        if self.save_freq == "epoch":
            return point.kind == "epoch"
        if isinstance(self.save_freq, int):
            return point.kind == "batches" and point.batches % self.save_freq == 0
        return time.monotonic() - self._saved_at >= self.save_freq.total_seconds()

    def _save(self, point: SavePoint, wait: bool = False) -> bool:
        if point.is_at_limit and point.kind != "batches":  # saved already, where the run can continue
            point.wait()
            return True
        is_saved = point.save(self._folder, keep=2 if self.double_checkpoint else 1, wait=wait)
        self._saved_at = time.monotonic()
        return is_saved

    def _save_and_exit(self) -> None:
        is_saved = self._save(self._point, wait=True)
        assert self.preemption_signal is not None, "it was received"
        what = "the run is" if is_saved else "the weights are not finite, and only what was before is"
        LOGGER.warning("Received %s: %s saved in %r. The same command goes on from there.",
                       self.preemption_signal.name, what, self.backup_dir)
        raise SystemExit(PREEMPTED_EXIT_CODE)

    # --- the signal ------------------------------------------------------------------------------------------------

    def _check_for_several_processes(self) -> None:
        if isinstance(self.save_freq, datetime.timedelta):
            raise ValueError("`save_freq` must be 'epoch' or a number of batches where several processes train: their "
                             f"clocks differ. Received: {self.save_freq!r}.")
        if self.save_on_error:
            raise ValueError("`save_on_error` is for one process: of several, the others would be waited for. Use a "
                             "`save_freq`.")
        if self.preemption_signal not in (None, signal.SIGTERM):
            raise ValueError("`preemption_signal` must be SIGTERM or None where several processes train. Received: "
                             f"{self.preemption_signal!r}.")

    def _is_preempted_everywhere(self) -> bool:
        if jax.process_count() == 1 or self.preemption_signal is None:
            return self._is_preempted
        # JAX has its own handler, and finds a boundary that no process has passed.
        self._boundaries += 1
        return self._point.is_preempted(self._boundaries)

    def _listen(self) -> None:
        if jax.process_count() > 1:
            return
        # Python calls handlers in the main thread only, and only the main thread may set them.
        if threading.current_thread() is not threading.main_thread():
            return
        numbers: set[int] = set() if self.preemption_signal is None else {self.preemption_signal}
        if self.save_on_error and callable(signal.getsignal(signal.SIGINT)):  # a process may ignore it
            numbers |= {signal.SIGINT}
        for number in numbers:
            outer = signal.signal(number, self._note)
            if outer != self._note:  # else an exception ended the last `fit`
                self._outer_handlers[number] = signal.SIG_DFL if outer is None else outer

    def _stop_listening(self) -> None:
        for number, outer in self._outer_handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, outer)
        self._outer_handlers = {}

    def _note(self, number: int, frame: Any) -> None:
        if self._point.kind != "closed" and number == self.preemption_signal:
            self._is_preempted = True
        elif self._point.kind != "closed" and not self._is_interrupted:
            self._is_interrupted = True
            LOGGER.warning("Ctrl-C: the run ends after these batches, and is saved; again, it ends at once.")
        else:
            # An exception has ended `fit`, or the signal is urgent: it gets its previous meaning.
            outer = self._outer_handlers.get(number, signal.SIG_DFL)
            self._stop_listening()
            if callable(outer):
                outer(number, frame)
            else:
                signal.signal(number, outer)
                signal.raise_signal(number)


def _checked_save_freq(value: object) -> Any:
    if not isinstance(value, datetime.timedelta):
        expected = "'epoch', a whole number of at least 1, the batches, or a `datetime.timedelta`"
        return arguments.as_count_or_word("save_freq", value, ["epoch"], expected=expected)
    if value <= datetime.timedelta():
        raise ValueError(f"`save_freq` must be a time above 0. Received: {value!r}.")
    return value


def _checked_signal(value: object) -> signal.Signals:
    expected = "a signal, such as `signal.SIGTERM`, or None"
    number = arguments.as_count("preemption_signal", value, 1, expected)
    try:
        return signal.Signals(number)
    except ValueError:
        raise ValueError(f"`preemption_signal` must be {expected}. Received: {number}, which is no signal of this "
                         "system.") from None
