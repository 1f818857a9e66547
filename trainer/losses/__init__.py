"""Losses with Keras 3's names, arguments and numbers, as classes with a reduction and as functions without.

To add a loss, write a function and a class (see `BuiltinLoss`), and add the class to `registry.CLASSES` and to the
stub beside this file.
"""

from trainer.core.calls.public_names import attach_stub

_FOREIGN_NAMES = {  # of PyTorch
    "MSELoss": "Instead: `MeanSquaredError()`.",
    "L1Loss": "Instead: `MeanAbsoluteError()`.",
    "CrossEntropyLoss": "Instead: `SparseCategoricalCrossentropy(from_logits=True)`.",
    "NLLLoss": "Instead: `SparseCategoricalCrossentropy()`, of probabilities.",
    "BCELoss": "Instead: `BinaryCrossentropy()`.",
    "BCEWithLogitsLoss": "Instead: `BinaryCrossentropy(from_logits=True)`.",
}

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=_FOREIGN_NAMES)
