"""Setting the learning rate of every epoch by a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.callbacks.callback import Callback, adds_logs


class LearningRateScheduler(Callback):
    """Sets the learning rate before every epoch, and puts it as `learning_rate` into the epoch's logs.

    Args:
      schedule: called as `schedule(epoch, learning_rate)`, or as `schedule(epoch)` if it takes one argument, with the
        number of the epoch, from 0, and the learning rate so far, a float; returns the new one, a float or an array
        of one floating-point number (so optax schedules of the epoch can be given as they are).
      verbose: 1 prints each learning rate that is set, 0 does not.

    Raises:
      TypeError: if `schedule` cannot be called.
      ValueError: from `fit`, if `schedule` returns anything else.

    Example:

    >>> from types import SimpleNamespace
    >>> scheduler = LearningRateScheduler(lambda epoch, learning_rate: learning_rate / 2, verbose=1)
    >>> scheduler.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.5)))
    >>> scheduler.on_epoch_begin(0)
    <BLANKLINE>
    Epoch 1: LearningRateScheduler setting learning rate to 0.25.
    """

    def __init__(self, schedule: Callable[..., Any], verbose: int = 0):
        self.schedule = schedule
        self.verbose = verbose
        self._takes_learning_rate = _takes_two_arguments(schedule)

    def on_epoch_begin(self, epoch, logs=None):
        optimizer = self.model.optimizer
        arguments = (epoch, float(optimizer.learning_rate)) if self._takes_learning_rate else (epoch,)
        learning_rate = self.schedule(*arguments)
        if not _is_float_scalar(learning_rate):
            raise ValueError(
                "The output of the `schedule` function should be a float. "
                f"Received: a value of type {type(learning_rate).__name__}. Return `float(...)` of it."
            )
        optimizer.learning_rate = float(learning_rate)
        if self.verbose > 0:
            print(f"\nEpoch {epoch + 1}: LearningRateScheduler setting learning rate to {learning_rate}.")

    @adds_logs("learning_rate")
    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)


def _takes_two_arguments(schedule: Callable[..., Any]) -> bool:
    # By its signature, not by trying: a TypeError that the schedule itself raises must reach the user.
    signature = inspect.signature(schedule)
    try:
        signature.bind(0, 0.0)
    except TypeError:
        return False
    return True


def _is_float_scalar(value: Any) -> bool:
    return np.ndim(value) == 0 and np.issubdtype(getattr(value, "dtype", type(value)), np.floating)
