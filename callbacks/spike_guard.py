"""Skipping updates with an unusually large loss or gradient norm."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.late_logs_callback import LateLogsCallback
from trainer.callbacks.base.run_protocol import Run, SavePoint
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.files import storage
from trainer.core.updates.spikes import SpikeRule

LOGGER = logging.getLogger(__name__)


class SpikeGuard(LateLogsCallback):
    """Skips updates with a loss or gradient norm far above its running median; optionally goes back to the last save.

    A value is a spike if it is not finite, or exceeds the median over the last `window` applied updates by more than
    `deviations` median absolute deviations (a deviation counts as at least 1% of the median). The update of a spike
    leaves the parameters, the optimizer state and the model state unchanged on all devices; only the step number
    increases. Until `window` updates are applied, updates with finite gradients are never skipped. The logs
    "skipped_steps" and "skipped_in_a_row" are as in `SkipNonFinite`; losses and metrics of skipped batches still count.
    With `rollback_after`, the log "spike_streaks" counts the streaks of so many skipped updates.

    The compiled step decides, by earlier losses and norms in the optimizer's state: nothing waits, steps stay fused,
    and a resumed run has the same bits. The callback sets the model's `spike_rule`, which stays set afterwards.
    `trainer.load` into a model without a `spike_rule` reads the rest of the state.

    With several optimizers, each decides by its own gradients. A custom `train_step` passes the loss to
    `apply_gradients(value=loss)`; without it, only the norm counts.

    Args:
      window: number of applied updates in the medians.
      deviations: number of deviations from which a value is a spike.
      rollback_after: number of consecutive skipped updates after which the run goes back to the weights and the
        optimizer state of the newest checkpoint in `backup_dir`, noticed at most one execution late. The data continue
        with the next batch, and the step number is kept. None never goes back.
      backup_dir: the folder of the `BackupAndRestore` of the same `fit`; needed for `rollback_after`.
      max_rollbacks: maximum number of rollbacks; instead of a further rollback, training ends.

    Raises:
      ValueError: if an argument is out of range, or only one of `rollback_after` and `backup_dir` is given; from `fit`,
        if no `BackupAndRestore` saves to `backup_dir`, or there are two of these callbacks.

    Example:

    >>> import trainer, numpy as np
    >>> from flax import linen as nn
    >>> model = trainer.Model(nn.Dense(1))
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((64, 2)), np.ones((64, 1))
    >>> y[60] = 1e4
    >>> guard = SpikeGuard(window=8)
    >>> history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[guard]).history
    >>> history["skipped_steps"]
    [1.0]
    """

    def __init__(
        self, window: int = 64, deviations: float = 10.0, rollback_after: int | None = None,
        backup_dir: str | os.PathLike[str] | None = None, max_rollbacks: int = 3,
    ):
        arguments.check_counts(2, window=window)
        arguments.require_positive(deviations=deviations)
        arguments.check_count("rollback_after", rollback_after, 1, optional=True)
        arguments.check_count("max_rollbacks", max_rollbacks, 1)
        if (rollback_after is None) != (backup_dir is None):
            raise ValueError("`rollback_after` goes back to a checkpoint in `backup_dir`: give both, or neither. "
                             f"Received: rollback_after={rollback_after!r}, backup_dir={backup_dir!r}.")
        self.window, self.deviations, self.rollback_after = window, float(deviations), rollback_after
        self.backup_dir = None if backup_dir is None else storage.as_place(
            "backup_dir", backup_dir, "the folder of `BackupAndRestore`")
        self.max_rollbacks = max_rollbacks
        self._streaks = self._rollbacks = 0
        self._is_due = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "streaks": self._streaks, "rollbacks": self._rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = {"streaks", "rollbacks"}
        super().load_state_dict({name: value for name, value in state.items() if name not in own})
        self._streaks, self._rollbacks = state["streaks"], state["rollbacks"]

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        model.spike_rule = SpikeRule(self.window, self.deviations, self.rollback_after)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._streaks = self._rollbacks = 0
        self._is_due = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._streaks = 0

    def flush(self) -> bool:
        is_bad = super().flush()
        return is_bad or self._is_due  # so that the newest checkpoint is still from before the spikes

    def on_save_point(self, point: SavePoint) -> None:
        if not self._is_due or point.kind not in ("batches", "epoch"):
            return
        self._is_due = False
        if self._rollbacks >= self.max_rollbacks:
            if self.model.stop_training:
                return  # spikes until the end of the running batches
            print_message(f"The losses spike again after {self._rollbacks} rollbacks; terminating training.")
            self.model.stop_training = True
            return
        self._rollbacks += 1
        assert self.backup_dir is not None
        path = point.roll_back(storage.absolute(self.backup_dir))  # as `BackupAndRestore` gives it
        LOGGER.warning("%d updates in a row were spikes, and skipped. %s", self.rollback_after,
                       f"The run has gone back to the weights of {path!r}." if path else
                       f"There is no checkpoint in {self.backup_dir!r} yet to go back to.")

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        if self.rollback_after is not None:  # else there is nothing to read
            super()._after_batches(first, last, logs)

    def _read_logs(self, first: int, last: int, logs: Any) -> None:
        streaks = int(logs.get("spike_streaks", 0))
        self._is_due |= streaks > self._streaks
        self._streaks = streaks
