"""Data sets for a start, in Keras's form: `(x_train, y_train), (x_test, y_test)` as NumPy arrays.

Owns the search for Keras's files and their reading: nothing in them is executed.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
