"""The record of what every epoch's logs were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.callbacks.base.lazy_logs import begin_fetch
from trainer.callbacks.base.run_protocol import Run


class History(Callback):
    """Records the logs of every epoch; every `fit` has a history and returns it.

    Where there is no other callback, the logs of an epoch are fetched when the next epoch ends or training does, or
    `history` is read: the device has the next epoch's steps by then.

    Attributes:
      history: for each log, the list of its values as python floats. A log that not every epoch has (a validation with
        `validation_freq=2`) has a shorter list.
      epoch: the numbers of the recorded epochs, from 0; emptied when `fit` begins.
      timing: where the time of the last `fit` went, once it has ended: the seconds that the host waited for "data",
        for a "compile" and for the "device", those spent in "callbacks", on a "checkpoint" and by the loop itself
        ("host"), their sum "total", and "rows_per_sec", the training rows per second without compilation.

    Example:

    >>> history = History()
    >>> history.on_train_begin()
    >>> history.on_epoch_end(0, {"loss": 0.5})
    >>> history.history, history.epoch
    ({'loss': [0.5]}, [0])
    """

    state_attributes = ("history", "epoch")
    reads_late = False  # whether `history` cannot be read while it is an epoch behind

    def __init__(self):
        self.history = {}
        self.epoch: list[int] = []
        self.timing: dict[str, float] = {}

    @property
    def history(self) -> dict[str, list[Any]]:
        self._read_unread()
        return self._history

    @history.setter
    def history(self, history: dict[str, list[Any]]) -> None:
        self._history = history
        self._unread: Mapping[str, Any] | None = None

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        model.history = self

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.epoch = []

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = logs or {}
        if self.reads_late:
            begin_fetch(logs)
        self._read_unread()
        self.epoch.append(epoch)
        self._unread = logs
        if not self.reads_late:
            self._read_unread()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._read_unread()

    def _read_unread(self) -> None:
        values = list((self._unread or {}).items())  # may be interrupted, or fail
        self._unread = None
        for name, value in values:
            self._history.setdefault(name, []).append(_python_number(value))


def _python_number(value: Any) -> Any:
    """Returns an array of one number as a python number, and anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
