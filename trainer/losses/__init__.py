"""Losses with Keras 3's names, arguments and numbers, as classes with a reduction and as functions without.

To add a loss, write a function and a class (see `BuiltinLoss`), and add the class to `registry.CLASSES` and to the
stub beside this file.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
