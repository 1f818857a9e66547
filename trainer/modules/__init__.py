"""One functional interface for Linen modules, NNX modules, stacks of layers and dicts of named modules.

Nothing outside of this package needs to know which kind of module it was given.
"""

from trainer.core.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
