"""Ending a training whose loss is NaN or infinite."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import numpy as np

from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.late_logs_callback import LateLogsCallback
from trainer.callbacks.base.lazy_logs import LazyLogs
from trainer.callbacks.base.log_values import named_weights
from trainer.callbacks.base.run_protocol import run_detail
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.arguments import require_bool
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import see

_SHOWN_WEIGHTS = 5


def warn_of_non_finite_logs(model: object, logs: Logs) -> None:
    """Warns if the last logs of a training have NaN or infinite values.

    The training logs include batches whose updates were skipped. If the model skipped updates, only the validation logs
    are checked.

    Args:
      model: trained model.
      logs: logs of the last epoch.
    """
    skips = getattr(model, "skip_non_finite", False)
    non_finite = {name: f"{name}={value}" for name, value in logs.items()
                  if _is_numeric(value) and not np.isfinite(value).all() and (name.startswith("val_") or not skips)}
    if not non_finite:
        return
    if any(name == "loss" or name.endswith("_loss") for name in non_finite if not name.startswith("val_")):
        advice = ("Look for NaN in the data, and for ids outside of an `nn.Embed`, whose rows are NaN. "
                  "`TerminateOnNaN()` ends it at the batch where that begins and names the weights; "
                  "`compile(skip_non_finite=True)` leaves such updates out; "
                  "`jax.config.update('jax_debug_nans', True)` with `run_eagerly=True` shows the operation.")
    else:
        advice = "The loss that was trained on is finite: look at the data, and at what these logs compute."
    warnings.warn(f"The training has ended with {', '.join(non_finite.values())}. {advice} {see('not-finite')}",
                  RuntimeWarning, stacklevel=user_stacklevel())


def _is_numeric(value: object) -> bool:
    return np.issubdtype(np.asarray(value).dtype, np.number)


def _for_other_loops(hook: Any) -> Any:
    """Marks a batch hook that the trainer's loop need not call, so that batches stay fused."""
    hook.is_for_other_loops = True
    return hook


class TerminateOnNaN(LateLogsCallback):
    """Ends `fit` after a batch whose loss is NaN or infinite, and names the non-finite weights.

    The loss of an execution is checked after the next execution has begun, so that the device does not wait: `fit` ends
    at most one execution late. The check is earlier at the end of an epoch and before a save, before any callback acts
    on them, in any order of the list: `ModelCheckpoint` and `BackupAndRestore` save nothing from that batch on, so that
    the last good file stays. If several batches ran as one execution, the message names them.

    Args:
      raise_error: False to set `model.stop_training`, so that `fit` ends as usual; True to raise, so that
        `on_train_end` is not called and no callback uses the non-finite weights as a result.

    Raises:
      RuntimeError: from `fit`, with `raise_error=True`.

    Example:

    >>> TerminateOnNaN(raise_error=True).on_batch_end(3, {"loss": float("nan")})
    Traceback (most recent call last):
    RuntimeError: NaN or Inf loss encountered at batch 3. Loss value: nan. Terminating training immediately.

    Source: Keras 3's callback of this name, which checks every batch before the next batch begins. There, without
    `raise_error`, the non-finite weights are saved at the end of the epoch.
    """

    def __init__(self, raise_error: bool = False):
        require_bool(raise_error=raise_error)
        self.raise_error = raise_error

    @_for_other_loops
    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if not isinstance(logs, LazyLogs):  # logs of the trainer's loop are read later
            self._check(batch, batch, logs or {})

    def _read_logs(self, first: int, last: int, logs: Logs | None) -> None:
        if not self._has_terminated:  # else it is that execution's loss that is still in the epoch's
            self._check(first, last, logs)

    def flush(self) -> bool:
        super().flush()
        return self._has_terminated

    def _check(self, first: int, last: int, logs: Any) -> None:
        loss = logs.get("loss")
        if loss is None or math.isfinite(loss):
            return
        self._has_terminated = True
        details = self._which_batch(first, last) + self._which_weights()
        if self.raise_error:
            raise RuntimeError(f"NaN or Inf loss encountered at batch {last}. Loss value: {loss}. Terminating training "
                               f"immediately.{details}")
        print_message(f"Batch {last}: Invalid loss, terminating training{details and '.'}{details}")
        self.model.stop_training = True

    def _which_batch(self, first: int, last: int) -> str:
        return "" if first == last else (
            f" It is one of the batches {first} to {last}, which ran as one execution.")

    def _which_weights(self) -> str:
        """Returns a sentence on the non-finite weights; empty for a model that does not expose its weights."""
        if run_detail(self.model, "state") is None:
            return ""
        weights = named_weights(self.model)
        non_finite = [name for name, weight in weights.items()
                      if jax.numpy.issubdtype(weight.dtype, np.inexact) and not np.isfinite(weight).all()]
        if not non_finite:
            return " All weights are finite."
        more = len(non_finite) - _SHOWN_WEIGHTS
        return (f" Weights that are not finite: {', '.join(non_finite[:_SHOWN_WEIGHTS])}"
                f"{f' and {more} more' if more > 0 else ''}, of {len(weights)}.")
