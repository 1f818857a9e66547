"""Skipping updates with non-finite gradients."""

from __future__ import annotations

from typing import Any

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.late_logs_callback import LateLogsCallback
from trainer.callbacks.base.run_protocol import Run
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message


class SkipNonFinite(LateLogsCallback):
    """Skips the updates of batches whose gradients have NaN or infinite values.

    Such an update leaves the parameters, the optimizer state and the model state unchanged on all replicas; only the
    step number increases. The log "skipped_steps" counts the skipped updates of an epoch, and "skipped_in_a_row" is the
    longest streak, including a streak from earlier epochs. The losses and metrics of such batches still count.

    The callback sets the model's `skip_non_finite`, as the argument of that name of `compile` does; it stays set
    afterwards. The check runs inside the step: nothing waits, and steps stay fused.

    Args:
      max_consecutive: number of consecutive skipped updates that ends the training, noticed at most one execution late.
        None never ends it.
      raise_error: False to set `model.stop_training` then, so that `fit` ends as usual; True to raise.

    Raises:
      ValueError: if `max_consecutive` is not a positive integer.
      RuntimeError: from `fit`, with `raise_error=True`.

    Example:

    >>> import trainer, numpy as np
    >>> from flax import linen as nn
    >>> model = trainer.Model(nn.Dense(1))
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((64, 2)), np.ones((64, 1))
    >>> x[5] = np.nan
    >>> history = model.fit(x, y, verbose=0, callbacks=[SkipNonFinite()]).history
    >>> history["skipped_steps"], bool(np.isfinite(model.predict(y.repeat(2, 1), verbose=0)).all())
    ([1.0], True)
    """

    def __init__(self, max_consecutive: int | None = None, raise_error: bool = False):
        arguments.check_count("max_consecutive", max_consecutive, optional=True)
        arguments.require_bool(raise_error=raise_error)
        self.max_consecutive = max_consecutive
        self.raise_error = raise_error

    def set_model(self, model: Run) -> None:
        super().set_model(model)
        model.skip_non_finite = True

    def _after_batches(self, first: int, last: int, logs: Logs | None) -> None:
        if self.max_consecutive is not None:  # else there is nothing to read
            super()._after_batches(first, last, logs)

    def _read_logs(self, first: int, last: int, logs: Any) -> None:
        in_a_row = int(logs.get("skipped_in_a_row", 0))
        if self.max_consecutive is None or in_a_row < self.max_consecutive or self._has_terminated:
            return
        self._has_terminated = True
        message = (f"Batch {last}: the gradients of {in_a_row} train steps in a row were not finite, and their updates "
                   "left out; terminating training.")
        if self.raise_error:
            raise RuntimeError(message)
        print_message(message)
        self.model.stop_training = True
