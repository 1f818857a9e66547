"""Base of callbacks that save after epochs or after a number of batches.

Owns the count of batches, the best value of the monitor, and deletion. Subclasses decide whether to save, and save.
"""

from __future__ import annotations

import abc
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax

from trainer.callbacks.base.callback import LogNames, Logs, adds_logs
from trainer.callbacks.base.monitor_callback import Mode, MonitorCallback
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.files import storage
from trainer.core.types import Phase, Verbose


class PeriodicSaves(TrainBatchCallback, MonitorCallback, abc.ABC):
    """Calls `_save_if_due` after each epoch or after a number of batches, at which executions end.

    Args:
      monitor, mode, initial_value_threshold, verbose, save_best_only, save_weights_only, max_to_keep: arguments of the
        subclass.
      save_freq: "epoch", or a number of batches, counted over the epochs.

    Raises:
      TypeError: for an argument of a wrong type.
      ValueError: for an argument out of range.
    """

    state_attributes: tuple[str, ...] = ("best", *TrainBatchCallback.counters, "_batches_seen_since_last_saving")
    saves = True

    def __init__(self, monitor: str, mode: Mode, initial_value_threshold: float | None,
                 save_freq: Literal["epoch"] | int, verbose: Verbose, save_best_only: bool, save_weights_only: bool,
                 max_to_keep: int | None):
        if initial_value_threshold is not None:  # by this name, and not the base's
            arguments.require_number(initial_value_threshold=initial_value_threshold)
        super().__init__(monitor, mode, initial_value_threshold)
        arguments.require_bool(save_best_only=save_best_only, save_weights_only=save_weights_only)
        arguments.check_count("max_to_keep", max_to_keep, optional=True)
        self.save_freq: str | int = arguments.as_count_or_word("save_freq", save_freq, ["epoch"])
        self.verbose = arguments.check_verbose(verbose)
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.max_to_keep = max_to_keep
        self._epoch = 0
        self._batches_seen_since_last_saving = 0
        self._needs_monitor = save_best_only

    def check_log_names(self, names: LogNames) -> None:
        available = names.some_epochs if self.save_freq == "epoch" else names.batches
        if available is not None:
            self.check_monitor(available)

    def check_monitor(self, available: Iterable[str]) -> None:
        """Rejects an unknown monitor if it decides about the saves.

        Raises:
          ValueError: if `monitor` is not available.
        """
        if self._needs_monitor:
            super().check_monitor(available)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        super().next_sync_step(phase, batch)
        if phase != "train" or not isinstance(self.save_freq, int):
            return None
        return batch + self.save_freq - self._batches_seen_since_last_saving - 1

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        if isinstance(self.save_freq, int):
            self._batches_seen_since_last_saving += last - first + 1
            if self._batches_seen_since_last_saving >= self.save_freq:
                self._batches_seen_since_last_saving = 0
                self._save_if_due(self._epoch, last, {} if logs is None else logs)

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_freq == "epoch":
            self._save_if_due(epoch, None, {} if logs is None else logs)

    def _monitored(self, batch: int | None, logs: Mapping[str, Any]) -> Any:
        """Returns the monitored value, or None in an epoch without it; raises ValueError at a batch without it."""
        if batch is not None and self.monitor not in logs:
            self.check_monitor(logs)
        return self.get_monitor_value(logs)

    @abc.abstractmethod
    def _save_if_due(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> None:
        """Saves, unless the logs do not justify it."""

    def _improves(self, epoch: int, value: Any) -> bool:
        """Returns whether a value is the best so far, and then keeps it as `best`."""
        self._set_monitor_op()
        if not self._is_improvement(value, self.best):
            self._say(epoch, f"{self.monitor} did not improve from {self.best:.5f}")
            return False
        self.best = value
        return True

    def _say(self, epoch: int, text: str) -> None:
        if self.verbose > 0:
            print_message(f"\nEpoch {epoch + 1}: {text}")

    def _delete(self, path: str) -> None:
        """Deletes a file or a folder, in the first process; warns on failure."""
        if jax.process_index() != 0:
            return
        try:
            storage.remove(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and (storage.is_remote(path) or not os.path.lexists(path)):
                return  # deleted already, such as by the run that was resumed
            warnings.warn(f"`{type(self).__name__}` cannot delete {path!r}: {error}", UserWarning, stacklevel=2)
