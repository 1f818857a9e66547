"""Optax transformations for Keras's optimizers, where optax has none with Keras's numbers."""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
