"""Loggers of training metrics, and the callback that sends metrics to them.

Owns the `Logger` protocol, a file of JSON lines, and adapters of packages that track experiments. A logger imports its
package when it is created. The model describes the run in numbers and texts.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
