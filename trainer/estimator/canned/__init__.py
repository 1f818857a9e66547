"""Canned estimators, which need no `model_fn`: linear, deep, combined, and baselines."""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
