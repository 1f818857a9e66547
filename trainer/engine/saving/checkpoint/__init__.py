"""Checkpoints on disk: written atomically, verified bit for bit, restored exactly on any devices.

The lowest level of an exact resume. It knows names, arrays and plain values, nothing of models, loops or callbacks.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
