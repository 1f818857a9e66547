"""Strategies: the devices that train together, the placement of the state, and the reduction of values."""

from trainer.core.calls.public_names import attach_stub
from trainer.distribute.replica import strategy_names, tensorflow_names

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=tensorflow_names.missing() | strategy_names.MISSING)
