"""Callbacks: what happens at the points of a training, besides training.

Owns the hooks (`Callback`), the calling of many together (`CallbackList`), and the callbacks that need nothing but the
model they are given. Imports nothing of the trainer: `Run` says what a callback may use of a model.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
