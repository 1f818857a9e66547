"""A mesh that the script has set for code of its own (`jax.set_mesh`), which the trainer's programs must not see.

JAX puts each new array on that mesh and refuses others beside it. The trainer's arrays and programs lie on the mesh of
their strategy. So what users call of the trainer runs without theirs, and they find it again afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

Class = TypeVar("Class", bound=type)

_NO_MESH = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def script_mesh_hidden() -> Iterator[None]:
    """Hides a mesh that the script has set from the block, or from each call of the function that it decorates."""
    try:
        is_set = not jax.sharding.get_mesh().empty
    except ValueError:  # Something is being traced, and the mesh was hidden before that began.
        is_set = False
    with jax.set_mesh(_NO_MESH) if is_set else contextlib.nullcontext():
        yield


def hiding_script_mesh(decorated: Class) -> Class:
    """Returns a class whose constructor, calls, public methods and properties now hide a mesh of the script."""
    for name, member in list(vars(decorated).items()):
        if name in ("__init__", "__call__") or not name.startswith("_"):
            setattr(decorated, name, _hiding(member))
    return decorated


def _hiding(member: Any) -> Any:
    if isinstance(member, property):
        getter, setter, deleter = (part and _hiding(part) for part in (member.fget, member.fset, member.fdel))
        return property(getter, setter, deleter, member.__doc__)
    if not inspect.isgeneratorfunction(member):
        return script_mesh_hidden()(member) if inspect.isfunction(member) else member

    @functools.wraps(member)
    def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with contextlib.closing(member(*args, **kwargs)) as values:
            while True:
                with script_mesh_hidden():  # not while the script has a value
                    try:
                        value = next(values)
                    except StopIteration:
                        return
                yield value

    return iterate
