"""Tools around a training: before, after and alongside it. They use a model as its users do."""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
