"""Summaries of models: which layers were called, what they hold and compute, and tables of that.

Knows neither Linen nor NNX: adapters tell which layers are called.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
