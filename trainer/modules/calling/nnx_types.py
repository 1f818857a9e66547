"""Whether a value is an object of NNX, asked without importing `flax.nnx`.

Owns that question alone. Importing NNX takes a tenth of the time that JAX and Flax take together, and Flax does not do
so itself. Who has an NNX object has imported it already; who has none shall not pay.
"""

from __future__ import annotations

import sys
from typing import Any


def is_nnx_module(value: Any) -> bool:
    """Returns whether a value is an NNX module."""
    if "flax.nnx" not in sys.modules:
        return False
    # Not at the top: what this file is for. An import, as another thread may not be done with its own.
    from flax import nnx

    return isinstance(value, nnx.Module)


def is_nnx_object(value: Any) -> bool:
    """Returns whether a value is an NNX module, optimizer or another container of NNX variables."""
    if "flax.nnx" not in sys.modules:
        return False
    # Not at the top, as above.
    from flax import nnx

    return isinstance(value, nnx.Pytree)
