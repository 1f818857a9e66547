"""Learning rates from a function of the epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.callbacks.base.log_values import learning_rate_names, learning_rates, optimizers_of
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.arguments import check_verbose
from trainer.core.errors import wrong_type
from trainer.core.types import Verbose


class LearningRateScheduler(Callback):
    """Sets the learning rate before every epoch, and adds it to the epoch's logs as `learning_rate`.

    With several named optimizers, each rate is set, and logged as `learning_rate_generator` and so on.

    Args:
      schedule: function called as `schedule(epoch, learning_rate)`, or as `schedule(epoch)` if it takes one argument,
        with the index of the epoch, from 0, and the current learning rate, a float. It returns the new rate, a float or
        an array of one floating-point number (so optax schedules of the epoch work unchanged).
      verbose: 1 to print each new learning rate, 0 for no messages.

    Raises:
      TypeError: if `schedule` is not callable.
      ValueError: from `fit`, if `schedule` returns anything else, or if the learning rate of an optax transformation is
        unknown.

    Example:

    >>> from types import SimpleNamespace
    >>> scheduler = LearningRateScheduler(lambda epoch, learning_rate: learning_rate / 2, verbose=1)
    >>> scheduler.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.5)))
    >>> scheduler.on_epoch_begin(0)
    <BLANKLINE>
    Epoch 1: LearningRateScheduler setting learning rate to 0.25.
    """

    def __init__(self, schedule: Callable[..., Any], verbose: Verbose = 0):
        if not callable(schedule):
            raise wrong_type("schedule", schedule, "a function of the epoch, or of the epoch and the learning rate")
        self.schedule = schedule
        self.verbose = check_verbose(verbose)
        self._takes_learning_rate = _takes_two_arguments(schedule)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        for name, optimizer in optimizers_of(self.model).items():
            arguments = (epoch, float(optimizer.learning_rate)) if self._takes_learning_rate else (epoch,)
            learning_rate = self.schedule(*arguments)
            if not _is_float_scalar(learning_rate):
                raise ValueError(
                    "The output of the `schedule` function should be a float. "
                    f"Received: a value of type {type(learning_rate).__name__}. Return `float(...)` of it."
                )
            optimizer.learning_rate = float(learning_rate)
            if self.verbose > 0:
                what = f"{name} learning rate" if name else "learning rate"
                print_message(f"\nEpoch {epoch + 1}: LearningRateScheduler setting {what} to {learning_rate}.")

    @adds_logs(of_model=learning_rate_names)
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs.update(learning_rates(self.model))


def _takes_two_arguments(schedule: Callable[..., Any]) -> bool:
    # Inspects the signature instead of trying a call: a TypeError of the schedule itself must reach the user.
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # some functions written in C have none
        return True
    try:
        signature.bind(0, 0.0)
    except TypeError:
        return False
    return True


def _is_float_scalar(value: Any) -> bool:
    return np.ndim(value) == 0 and np.issubdtype(getattr(value, "dtype", type(value)), np.floating)
