"""Base of callbacks that save after epochs or after a number of batches.

Owns the counts of batches. Subclasses decide whether to save, and save.
"""

from __future__ import annotations

import abc
import os
import shutil
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from trainer.callbacks.base.callback import Logs, adds_logs
from trainer.callbacks.base.interactive_logging import print_message
from trainer.callbacks.base.monitor_callback import Mode, MonitorCallback
from trainer.core import arguments
from trainer.core.types import Phase, Verbose


class PeriodicSaves(MonitorCallback, abc.ABC):
    """Calls `_save_if_due` after each epoch or after a number of batches, at which executions end.

    Args:
      monitor, mode, baseline: arguments of `MonitorCallback`.
      save_freq: "epoch", or a number of batches, counted over the epochs.
      verbose: whether `_say` prints.

    Raises:
      ValueError: for another `save_freq`, or from `MonitorCallback`.
    """

    counters = ("best", "_current_epoch", "_last_batch_seen", "_batches_seen_since_last_saving")
    saves = True
    stops_consistently = True

    def __init__(self, monitor: str, mode: Mode, baseline: float | None, save_freq: Literal["epoch"] | int,
                 verbose: Verbose):
        super().__init__(monitor, mode, baseline)
        self.verbose = arguments.check_verbose(verbose)
        self.save_freq: str | int = arguments.as_count_or_word("save_freq", save_freq, ["epoch"])
        self._current_epoch: int | None = None
        self._last_batch_seen = -1
        self._batches_seen_since_last_saving = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._current_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch != self._current_epoch:  # else a resumed run goes on with an epoch that it had begun
            self._current_epoch, self._last_batch_seen = epoch, -1

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        if phase != "train" or not isinstance(self.save_freq, int):
            return None
        return batch + self.save_freq - self._batches_seen_since_last_saving - 1

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        if phase != "train" or not isinstance(self.save_freq, int):
            return
        self._count(batch - self._last_batch_seen)
        self._last_batch_seen = batch
        if self._batches_seen_since_last_saving >= self.save_freq:
            self._batches_seen_since_last_saving = 0
            self._save_if_due(self._current_epoch or 0, batch, {} if logs is None else logs)

    def _count(self, batches: int) -> None:
        self._batches_seen_since_last_saving += batches

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_freq == "epoch":
            self._save_if_due(epoch, None, {} if logs is None else logs)

    @abc.abstractmethod
    def _save_if_due(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> None:
        """Saves, unless the logs do not justify it."""

    def _say(self, epoch: int, text: str) -> None:
        if self.verbose > 0:
            print_message(f"\nEpoch {epoch + 1}: {text}")


def delete(path: str, owner: str) -> None:
    """Deletes a file or a folder; warns in the name of a callback on failure."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)
    except FileNotFoundError:
        pass  # deleted already, such as by the run that was resumed
    except OSError as error:
        warnings.warn(f"`{owner}` cannot delete {path!r}: {error}", UserWarning, stacklevel=2)
