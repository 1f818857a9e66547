"""Base of callbacks that act at certain train batches of a `fit`.

Owns the count of batches over the epochs. Subclasses act at the batches.
"""

from __future__ import annotations

from trainer.callbacks.base.callback import Callback, Logs
from trainer.core.types import Phase


class TrainBatchCallback(Callback):
    """Base of callbacks that count the train batches of a `fit`, over its epochs and from 1.

    The count excludes batches that ran before the callback was present, such as the batches before a resumed run. A
    subclass that keeps the counters has `TrainBatchCallback.counters` in its `state_attributes`.

    Subclasses override `_after_batches`, and may limit executions with `next_sync_step`. A subclass that overrides
    `next_sync_step`, `on_train_begin` or `on_epoch_begin` calls the base method first.

    Example:

    >>> class Printer(TrainBatchCallback):
    ...     def _after_batches(self, first: int, last: int, logs: Any) -> None:
    ...         print(f"{first} to {last} of this epoch; {self._number(last)} in all")
    >>> printer = Printer()
    >>> printer.on_train_begin()
    >>> for epoch in range(2):
    ...     printer.on_epoch_begin(epoch)
    ...     printer.on_execution_end("train", 3, {})
    0 to 3 of this epoch; 4 in all
    0 to 3 of this epoch; 8 in all
    """

    stops_consistently = True
    counters = ("_batches_before_epoch", "_last_batch")
    _batches_before_epoch = 0
    _last_batch = -1  # of this epoch, from 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._batches_before_epoch, self._last_batch = 0, -1

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._batches_before_epoch += self._last_batch + 1
        self._last_batch = -1

    def next_sync_step(self, phase: Phase, batch: int) -> int | None:
        if phase == "train" and self._last_batch < 0:  # so there are batches that this callback has not seen
            self._batches_before_epoch -= batch
            self._last_batch = batch - 1
        return None

    def on_execution_end(self, phase: Phase, batch: int, logs: Logs | None = None) -> None:
        if phase == "train":
            first, self._last_batch = self._last_batch + 1, batch
            self._after_batches(first, batch, logs)

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        """Called after an execution of the epoch's batches `first` to `last`, counted from 0."""

    def _number(self, batch: int) -> int:
        """Returns the number in this `fit`, from 1, of a batch of this epoch."""
        return self._batches_before_epoch + batch + 1
