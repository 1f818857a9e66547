"""The coordinator of parameter servers, as in `tf.distribute`."""

from trainer.core.calls.public_names import attach_stub
from trainer.distribute.replica import tensorflow_names

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=tensorflow_names.missing("coordinator"))
