"""Losses with Keras 3's names, arguments and numbers: classes with a reduction, and functions without.

A new loss is a function and a class (see `BuiltinLoss`) in the module it fits, and its class's name in
`registry.CLASSES` and in the stub beside this file.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
