"""Early stopping of a training that no longer improves."""

from __future__ import annotations

import contextlib

import numpy as np

from trainer.callbacks.base.callback import Logs, adds_logs
from trainer.callbacks.base.monitor_callback import Mode, MonitorCallback
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.types import Verbose


class EarlyStopping(MonitorCallback):
    """Ends `fit` when a log has not improved for a number of epochs.

    Args:
      monitor: name of the log.
      min_delta: minimum change that counts as an improvement.
      patience: number of epochs without an improvement after which training ends. The first epoch never ends it.
      verbose: 1 to print messages, 0 for no messages.
      mode: "min", "max" or "auto" (see `MonitorCallback`).
      baseline: additional value to improve on: the wait restarts only after an epoch that is better than the baseline
        and than all earlier epochs.
      restore_best_weights: whether `fit` ends with the weights of the best epoch, regardless of the baseline, instead
        of the last weights.
      start_from_epoch: index of the first monitored epoch, from 0.

    Attributes:
      best: best monitored value.
      best_epoch: index of the best epoch, from 0.
      best_weights: Weights at the end of the best epoch, with `ema_decay` the averages; None without
        `restore_best_weights`.
      wait: number of epochs since the last improvement.
      stopped_epoch: index of the epoch that ended the training; 0 if none.

    Raises:
      ValueError: from `fit`, if no log has the name `monitor`, or if `mode` is "auto" and the direction is unknown.

    Example:

    >>> from types import SimpleNamespace
    >>> stopping = EarlyStopping("loss", patience=2)
    >>> stopping.set_model(SimpleNamespace(stop_training=False))
    >>> stopping.on_train_begin()
    >>> for epoch, loss in enumerate([0.5, 0.4, 0.45, 0.41]):
    ...     stopping.on_epoch_end(epoch, {"loss": loss})
    >>> stopping.model.stop_training, stopping.best_epoch, stopping.stopped_epoch
    (True, 1, 3)
    """

    state_attributes = ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: Verbose = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ):
        super().__init__(monitor, mode, baseline, min_delta)
        arguments.require_bool(restore_best_weights=restore_best_weights)
        self.patience = arguments.as_count("patience", patience, 0)
        self.verbose = arguments.check_verbose(verbose)
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = arguments.as_count("start_from_epoch", start_from_epoch, 0)
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.stopped_epoch = 0
        self.best = None
        self.best_epoch = 0
        self.best_weights: list[np.ndarray] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        current = self.get_monitor_value(logs)
        self._set_monitor_op()
        if current is None or epoch < self.start_from_epoch:
            return
        self.wait += 1
        if self._is_improvement(current, self.best):
            self.best = current
            self.best_epoch = epoch
            if self.restore_best_weights:
                # Moving averages, if validation uses them. A loop by hand may have a model without a `current_run`.
                run = getattr(self.model, "current_run", None)
                with getattr(run, "showing_averages", contextlib.nullcontext)():
                    self.best_weights = self.model.get_weights()
            if self._is_improvement(current, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        if self.stopped_epoch > 0 and self.verbose > 0:
            print_message(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is not None:
            if self.verbose > 0:
                print_message(f"Restoring model weights from the end of the best epoch: {self.best_epoch + 1}.")
            self.model.set_weights(self.best_weights)
