"""Reduction of the learning rate of a training that no longer improves."""

from __future__ import annotations

import numpy as np

from trainer.callbacks.base.callback import Logs, adds_logs
from trainer.callbacks.base.log_values import learning_rate_names, learning_rates, optimizers_of
from trainer.callbacks.base.monitor_callback import Mode, MonitorCallback
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.types import Verbose


class ReduceLROnPlateau(MonitorCallback):
    """Multiplies the learning rate by a factor when a log has not improved for a number of epochs.

    Adds `learning_rate`, the rate during the epoch, to the epoch's logs. With several named optimizers, each rate is
    multiplied, and logged as `learning_rate_generator` and so on.

    Args:
      monitor: name of the log.
      factor: factor of the learning rate; below 1.
      patience: number of epochs without an improvement after which the learning rate is reduced.
      verbose: 1 to print messages, 0 for no messages.
      mode: "min", "max" or "auto" (see `MonitorCallback`).
      min_delta: minimum change that counts as an improvement.
      cooldown: number of epochs after a reduction during which no waiting begins.
      min_lr: lower bound of the learning rate.

    Attributes:
      best: best monitored value.
      wait: number of epochs since the last improvement, reduction or cooldown.
      cooldown_counter: number of remaining epochs of cooldown.

    Raises:
      ValueError: if `factor` is not above 0 and below 1; from `fit`, if no log has the name `monitor`, if `mode` is
        "auto" and the direction is unknown, or if the learning rate of an optax transformation is unknown.

    Example:

    >>> from types import SimpleNamespace
    >>> plateau = ReduceLROnPlateau("loss", factor=0.5, patience=1)
    >>> plateau.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.1)))
    >>> plateau.on_train_begin()
    >>> for epoch, loss in enumerate([0.5, 0.6]):
    ...     plateau.on_epoch_end(epoch, {"loss": loss})
    >>> plateau.model.optimizer.learning_rate
    0.05
    """

    state_attributes = ("best", "wait", "cooldown_counter")

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: Verbose = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ):
        super().__init__(monitor, mode, min_delta=min_delta)
        arguments.require({"factor": factor}, "a number above 0 and below 1", lambda number: 0 < number < 1)
        arguments.require_non_negative(min_lr=min_lr)
        self.factor = factor
        self.patience = arguments.as_count("patience", patience, 0)
        self.verbose = arguments.check_verbose(verbose)
        self.cooldown = arguments.as_count("cooldown", cooldown, 0)
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best = None
        self.wait = 0
        self.cooldown_counter = 0

    def in_cooldown(self) -> bool:
        """Returns whether a cooldown is active, during which no waiting begins."""
        return self.cooldown_counter > 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        learning_rates(self.model)  # raises before training for an unknown rate
        self._reset()

    @adds_logs(of_model=learning_rate_names)
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = {} if logs is None else logs
        logs.update(learning_rates(self.model))
        current = self.get_monitor_value(logs)
        self._set_monitor_op()
        if current is None:
            return
        if self.in_cooldown():
            self.cooldown_counter -= 1
            self.wait = 0
        if self._is_improvement(current, self.best):
            self.best = current
            self.wait = 0
        elif not self.in_cooldown():
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce_learning_rates(epoch)

    def _reduce_learning_rates(self, epoch: int) -> None:
        for name, optimizer in optimizers_of(self.model).items():
            old = float(optimizer.learning_rate)
            # A rate set to `min_lr` is read back rounded to float32, which must not count as above `min_lr`.
            if old <= np.float32(self.min_lr):
                continue
            new = max(old * self.factor, self.min_lr)
            optimizer.learning_rate = new
            self.cooldown_counter = self.cooldown
            self.wait = 0
            if self.verbose > 0:
                what = f"{name} learning rate" if name else "learning rate"
                print_message(f"\nEpoch {epoch + 1}: ReduceLROnPlateau reducing {what} to {new}.")
