"""Estimators that need no `model_fn`: linear, deep, both combined, and the baselines to compare with."""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
