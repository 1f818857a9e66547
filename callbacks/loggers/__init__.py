"""Loggers: where the numbers of a training go besides the terminal, and the callback that sends them there.

Owns the `Logger` protocol, a file of JSON lines, and adapters of packages that track experiments. A package is imported
when its logger is made. What a run is, in numbers and texts, comes from the model.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
