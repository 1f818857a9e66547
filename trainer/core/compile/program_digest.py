"""Digests of traced functions, equal if the traces are equal.

Owns the parts of a trace that count: all parts that do not vary between processes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core.types import PyTree

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def program_digest(function: Callable[..., Any], *arguments: PyTree) -> str:
    """Returns a short digest of a function's trace, including its constants. Nothing is computed.

    Traces change with the versions of the packages: compare digests only between equal versions.

    Args:
      function: a traceable function of arrays.
      *arguments: trees of arrays or shapes.

    >>> one, other, same = (program_digest(f, np.ones(3)) for f in (lambda x: x + 1, lambda x: x + 2, lambda y: y + 1))
    >>> one == other, one == same
    (False, True)
    """
    program = jax.make_jaxpr(function)(*arguments)
    digest = hashlib.sha256(_ADDRESS.sub("", str(program)).encode())
    for constant in filter(_is_comparable, _constants(program)):
        digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()[:8]


def _constants(value: object) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _constants(part)
        return
    yield from getattr(value, "consts", ())
    for equation in getattr(value, "eqns", ()):
        yield from _constants(list(equation.params.values()))


def _is_comparable(constant: object) -> bool:
    is_array = hasattr(constant, "dtype") and not jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return is_array and getattr(constant, "is_fully_addressable", True)
