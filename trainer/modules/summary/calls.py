"""The calls of a module's layers, as adapters tell of them.

Owns what an observer of calls receives, and what it may change of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from trainer.core.types import PyTree

Path = tuple[str, ...]


class ModuleLayer(NamedTuple):
    """A layer of a module.

    Attributes:
      path: the names that lead to the layer, joined by "/"; empty for the module itself.
      module: the user's object or function, or a module of the same class with the same arguments.
    """

    path: str
    module: Any


class CallObserver(Protocol):
    """What an adapter tells of the calls of layers, while nothing is computed."""

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function on abstract values; returns the shapes of what it returns."""

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        """Notes that a layer is being called; returns what it is called with in the place of `arguments`."""

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        """Notes what the call returned, the last one begun that has not ended; returns what stands in its place."""


def shapes_text(values: PyTree, rows: int | None) -> str:
    """Returns the shapes of arrays, with None for the batch dimension of so many rows.

    >>> shapes_text([jax.ShapeDtypeStruct((8, 3), "float32"), jax.ShapeDtypeStruct((), "int32")], 8)
    '(None, 3), ()'
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(values)]
    return ", ".join(str((None, *shape[1:]) if shape[:1] == (rows,) else shape) for shape in shapes)
