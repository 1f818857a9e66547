"""Data sets to begin with, in Keras's form: `(x_train, y_train), (x_test, y_test)` as numpy arrays.

Owns where Keras's files are looked for, and how they are read: nothing in them is executed.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
