"""Record of the logs of every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.callbacks.base.lazy_logs import begin_fetch
from trainer.callbacks.base.run_protocol import Run
from trainer.callbacks.record import tables
from trainer.callbacks.record.curves import curves
from trainer.core.arguments import require_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(Callback):
    """Records the logs of every epoch. Every `fit` has a history and returns it.

    Without other callbacks, the logs of an epoch are fetched at the end of the next epoch or of the training, or when
    `history` is read. The device then already has the steps of the next epoch.

    The `repr`, also in notebooks, is a table with a row for each epoch.

    Attributes:
      history: values of each log, as a list of Python floats. A log that some epochs lack (a validation with
        `validation_freq=2`) has a shorter list.
      epoch: indices of the recorded epochs, from 0; cleared when `fit` begins.
      timing: time of the last complete `fit`: the seconds that the host waited for "data", for a "compile" and for the
        "device", the seconds in "callbacks", on a "checkpoint" and in the loop itself ("host"), their sum "total", and
        "rows_per_sec", the training rows per second without compilation.

    Example:

    >>> history = History()
    >>> history.on_train_begin()
    >>> history.on_epoch_end(0, {"loss": 0.5})
    >>> history.history, history.epoch
    ({'loss': [0.5]}, [0])
    >>> history
    History of 1 epoch
    epoch  loss
    -----------
        1   0.5
    """

    state_attributes = ("history", "epoch", "_epochs")
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
        self._epochs: dict[str, list[int]] = {}  # of the values
        self._unread: tuple[int, Mapping[str, Any]] | None = None

    def __getitem__(self, log: str) -> NoReturn:
        raise TypeError(f"A History has its logs in an attribute. Write `history.history[{log!r}]`.")

    def __getstate__(self) -> Any:
        self._read_unread()  # the logs are on devices
        return super().__getstate__()

    def epochs_of(self, log: str) -> list[int]:
        """Returns the indices, from 0, of the epochs that have a value of a log.

        Raises:
          TypeError: if the name is not a string.
          KeyError: if there is no such log; the message lists the known logs.

        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.on_epoch_end(1, {"loss": 0.5, "val_loss": 0.5})
        >>> history.epochs_of("val_loss")
        [1]
        """
        require_text(log=log)
        if log not in self.history:
            known = ", ".join(map(repr, self.history)) or "none yet"
            raise KeyError(f"The history has no log {log!r}. Known logs: {known}.")
        values = self.history[log]
        epochs = self._epochs.get(log, [])
        # Values may be assigned.
        return list(epochs) if len(epochs) == len(values) else (
            list(self.epoch) if len(self.epoch) == len(values) else list(range(len(values))))

    def plot(self, *metrics: str) -> Figure:
        """Returns a matplotlib figure with an axis for each metric: training and validation over the epochs.

        A notebook shows it, and `history.plot().savefig("curves.png")` writes it.

        Args:
          *metrics: names of metrics, such as "loss"; none for all metrics. "val_loss" is drawn with "loss" and is not a
            valid name here.

        Raises:
          ImportError: if matplotlib is not installed.
          TypeError: if a metric is not a string.
          ValueError: if the history lacks a metric, or has no numbers.
        """
        return curves(self.history, {log: self.epochs_of(log) for log in self.history}, metrics or None)

    def __repr__(self) -> str:
        count = f"{len(self.epoch)} epoch{'s' * (len(self.epoch) != 1)}"
        return f"History of {count}" + (f"\n{tables.as_text(self._table())}" if self.history else "")

    def _repr_html_(self) -> str:
        return tables.as_html(self._table())

    def _table(self) -> list[list[str]]:
        return tables.table_rows(self.history, {log: self.epochs_of(log) for log in self.history})

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
        self._unread = epoch, logs
        if not self.reads_late:
            self._read_unread()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._read_unread()

    def _read_unread(self) -> None:
        if self._unread is None:
            return
        epoch, logs = self._unread
        values = list(logs.items())  # may be interrupted, or fail
        self._unread = None
        for name, value in values:
            self._history.setdefault(name, []).append(_python_number(value))
            self._epochs.setdefault(name, []).append(epoch)


def _python_number(value: Any) -> Any:
    """Returns an array of one number as a Python number, and anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
