"""Heads: what a task makes of logits, in the loss, the metrics, the predictions and the labels."""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
