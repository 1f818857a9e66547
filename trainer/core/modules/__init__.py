"""One functional interface for Linen modules, NNX modules, stacks of layers and dicts of named modules.

Code outside of this package does not depend on the kind of a module.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
