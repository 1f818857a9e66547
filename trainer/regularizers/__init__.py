"""Weight penalties for `compile(regularizers=...)`, with Keras's names and numbers."""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
