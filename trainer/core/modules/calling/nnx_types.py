"""Checks for NNX objects without importing `flax.nnx`.

Importing NNX takes a tenth of the import time of JAX and Flax together, and Flax itself does not import it. Code with
an NNX object has already imported it.
"""

from __future__ import annotations

import sys


def is_nnx_module(value: object) -> bool:
    """Returns whether a value is an NNX module."""
    if "flax.nnx" not in sys.modules:
        return False
    # Not at the top, see above. An import statement, because another thread's import may not be complete.
    from flax import nnx

    return isinstance(value, nnx.Module)


def is_nnx_object(value: object) -> bool:
    """Returns whether a value is an NNX module, optimizer or another container of NNX variables."""
    if "flax.nnx" not in sys.modules:
        return False
    # Not at the top, as above.
    from flax import nnx

    return isinstance(value, nnx.Pytree)
