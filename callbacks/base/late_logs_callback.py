"""Base of callbacks that read the logs of every execution without making the device wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.lazy_logs import begin_fetch
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback


class LateLogsCallback(TrainBatchCallback):
    """Base of callbacks that read the logs of each execution of `fit` after the next execution has begun.

    The device thus has work while the host waits for the logs. The remaining logs are read before any callback acts on
    the end of an epoch, and before the run or the model is saved (see `Callback.flush`).

    Subclasses override `_read_logs`. A subclass that overrides `on_train_begin` or `flush` calls the base method.

    Example:

    >>> class Printer(LateLogsCallback):
    ...     def _read_logs(self, first: int, last: int, logs: Any) -> None:
    ...         print(f"{first} to {last}: {logs['loss']}")
    >>> printer = Printer()
    >>> printer.on_train_begin()
    >>> printer.on_execution_end("train", 3, {"loss": 0.5})
    >>> printer.on_execution_end("train", 7, {"loss": 0.4})
    0 to 3: 0.5
    >>> printer.flush()
    4 to 7: 0.4
    False
    """

    _unread: tuple[int, int, Any] | None = None
    _has_terminated = False

    def state_dict(self) -> dict[str, Any]:
        unread = self._unread and (*self._unread[:2], dict(self._unread[2]))
        return {**super().state_dict(), "unread": unread, "has_terminated": self._has_terminated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = {"unread", "has_terminated"}
        super().load_state_dict({name: value for name, value in state.items() if name not in own})
        self._unread, self._has_terminated = state["unread"], state["has_terminated"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._unread, self._has_terminated = None, False  # an exception may have ended the last fit

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        logs = logs or {}
        begin_fetch(logs)
        self.flush()
        self._unread = first, last, logs

    def flush(self) -> bool:
        unread, self._unread = self._unread, None
        if unread is not None:
            self._read_logs(*unread)
        return False

    def _read_logs(self, first: int, last: int, logs: Logs | None) -> None:
        """Reads the epoch's logs so far, once for each execution of batches `first` to `last`, counted from 0."""
