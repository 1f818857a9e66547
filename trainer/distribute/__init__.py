"""Strategies: which devices train together, where the state lives, and how values are reduced."""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
