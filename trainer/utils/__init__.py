"""Keras's utilities, with its names and numbers.

Owns the preparation of data and scripts around a model. Utilities that lower rooms need live there and are exported
here.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
