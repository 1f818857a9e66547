"""Callbacks: actions at given points of training, evaluation and prediction.

Owns the hooks (`Callback`), the calls of several callbacks (`CallbackList`), and the callbacks that need only the model
they are given. Imports nothing from the trainer: `Run` is the interface between callbacks and the model.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
