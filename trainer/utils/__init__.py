"""Keras's utilities, with its names and numbers.

Owns what prepares data and scripts around a model. What is of use to lower rooms lives there and is named here.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
