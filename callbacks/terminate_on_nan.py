"""Ending a training whose loss is no number any more."""

from __future__ import annotations

import math

from trainer.callbacks.callback import Callback


class TerminateOnNaN(Callback):
    """Ends `fit` at the first batch whose loss is NaN or infinite.

    The loss is read after every batch, so every batch waits for the device and none are fused.

    Args:
      raise_error: False sets `model.stop_training`, so that `fit` ends as usual; True raises, so that `on_train_end` is
        not called and no callback takes the spoilt weights for a result.

    Raises:
      RuntimeError: from `fit`, with `raise_error=True`.

    Example:

    >>> TerminateOnNaN(raise_error=True).on_batch_end(3, {"loss": float("nan")})
    Traceback (most recent call last):
    RuntimeError: NaN or Inf loss encountered at batch 3. Loss value: nan. Terminating training immediately.
    """

    def __init__(self, raise_error: bool = False):
        self.raise_error = raise_error

    def on_batch_end(self, batch, logs=None):
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            raise RuntimeError(
                f"NaN or Inf loss encountered at batch {batch}. Loss value: {loss}. Terminating training immediately."
            )
        print(f"Batch {batch}: Invalid loss, terminating training")
        self.model.stop_training = True
