"""Heads: loss, metrics, predictions and label encoding of a task, from logits."""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
