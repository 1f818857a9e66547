"""Whether two functions compute the same, as far as their traces tell.

Owns which parts of a trace count: all but what differs from one process to the next. It must not know what is compared.
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
    """Returns a short text that two functions share if their traces are equal, constants included. Nothing is computed.

    Traces change with the versions of the packages: compare digests only where these are equal.

    Args:
      function: a function of arrays that can be traced.
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


def _constants(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _constants(part)
        return
    yield from getattr(value, "consts", ())
    for equation in getattr(value, "eqns", ()):
        yield from _constants(list(equation.params.values()))


def _is_comparable(constant: Any) -> bool:
    is_array = hasattr(constant, "dtype") and not jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return is_array and getattr(constant, "is_fully_addressable", True)
