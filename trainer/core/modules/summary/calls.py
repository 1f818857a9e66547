"""The interface of observers of layer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from trainer.core.types import PyTree

Path = tuple[str, ...]


class ModuleLayer(NamedTuple):
    """A layer of a module.

    Attributes:
      path: names that lead to the layer, joined by "/"; empty for the module itself.
      module: the user's object or function, or a module of the same class with the same arguments.
    """

    path: str
    module: Any


class CallObserver(Protocol):
    """Receives the calls of layers from an adapter, while nothing is computed."""

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function on abstract values, and returns the shapes of its outputs."""

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        """Records the begin of a layer's call, and returns the arguments to use in place of `arguments`."""

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        """Records the end of the innermost open call, and returns the outputs to use in place of `outputs`."""


def shapes_text(values: PyTree, rows: int | None) -> str:
    """Returns the shapes of arrays, with None for a batch dimension of size `rows`.

    >>> shapes_text([jax.ShapeDtypeStruct((8, 3), "float32"), jax.ShapeDtypeStruct((), "int32")], 8)
    '(None, 3), ()'
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(values)]
    return ", ".join(str((None, *shape[1:]) if shape[:1] == (rows,) else shape) for shape in shapes)
