"""Summaries of models: the called layers, their numbers and operations, and tables of them.

Knows neither Linen nor NNX: adapters report the calls.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
