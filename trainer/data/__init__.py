"""User data to host batches, to groups of batches, to groups that are placed ahead of use.

Owns everything between the user's `x` and a stacked tree of numpy arrays. It must not know about devices or strategies:
the caller of `prefetch` provides the function that places a group.
"""

from trainer.core.calls.public_names import attach_stub
from trainer.data.sources import foreign_names

__getattr__, __dir__, __all__ = attach_stub(__name__, missing=foreign_names.NAMES)
