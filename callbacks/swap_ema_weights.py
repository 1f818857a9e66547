"""Saving, and ending with, the moving averages of the weights."""

from __future__ import annotations

from typing import Any

from trainer.callbacks.base.callback import Callback, Logs, adds_logs
from trainer.core.arguments import require_bool


class SwapEMAWeights(Callback):
    """Replaces the weights by their moving averages at the end of `fit`.

    `compile(ema_decay=...)` keeps the averages. `evaluate`, `predict`, each validation and files of `save_weights` use
    them with or without this callback. With it, `get_weights`, `model(x)` and the next `fit` begin with the averages
    too. Until the end of `fit`, training continues with the trained weights.

    Args:
      swap_on_epoch: whether `get_weights` returns the averages from the end of an epoch to the beginning of the next,
        for later callbacks in the list.

    Raises:
      ValueError: from `fit`, `evaluate` and `predict`, if the model keeps no averages.

    Example:

    >>> callbacks = [SwapEMAWeights(swap_on_epoch=True), ModelCheckpoint("averaged.safetensors")]  # doctest: +SKIP
    >>> model.compile("adam", "mse", ema_decay=0.999)  # doctest: +SKIP
    >>> history = model.fit(x, y, epochs=10, callbacks=callbacks)  # doctest: +SKIP

    Source: Keras 3's callback of this name.
    """

    def __init__(self, swap_on_epoch: bool = False):
        require_bool(swap_on_epoch=swap_on_epoch)
        self.swap_on_epoch = swap_on_epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        _check(self.model)
        self.model.current_run.shows_averages = False  # an exception may have ended the last fit at the end of an epoch

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.model.current_run.shows_averages = False

    @adds_logs()
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.model.current_run.shows_averages = self.swap_on_epoch

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.model.current_run.shows_averages = False
        self.model.current_run.adopt_averages()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        _check(self.model)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        _check(self.model)


def _check(model: Any) -> None:
    if not model.current_run.keeps_averages:
        raise ValueError("SwapEMAWeights must be used when `use_ema=True` is set on the optimizer, which here is "
                         "`compile(ema_decay=0.999)`. Received: a model that keeps no moving averages.")
