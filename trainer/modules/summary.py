"""The calls of a module's layers, and the rows and the text of a model's summary.

Owns how calls become rows and rows become a table. It must not know Linen or NNX: adapters tell it which layers were
called and how many numbers lie at which path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from flax.traverse_util import flatten_dict

from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import PyTree

Path = tuple[str, ...]


class LayerRow(NamedTuple):
    """One layer of a summary.

    Attributes:
      path: the names that lead to the layer, joined by "/"; empty for the module itself.
      type_name: the name of its class.
      output_shape: the shapes of its outputs, with None for the batch dimension.
      params: how many numbers the layer itself holds: parameters and state.
      trainable: how many of these are trained; in a module's own rows, how many are parameters.
    """

    path: str
    type_name: str
    output_shape: str
    params: int
    trainable: int


class CallObserver(Protocol):
    """What an adapter tells of the calls of layers, while nothing is computed."""

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function on abstract values; returns the shapes of what it returns."""

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        """Notes that a layer is being called; returns what it is called with in the place of `arguments`."""

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        """Notes what the call returned, the last one begun that has not ended; returns what stands in its place."""


class ModuleLayer(NamedTuple):
    """A layer of a module.

    Attributes:
      path: the names that lead to the layer, joined by "/"; empty for the module itself.
      module: the user's object or function, or a module of the same class with the same arguments.
    """

    path: str
    module: Any


class CallRecorder:
    """Collects the layers that are called, in the order in which their calls begin.

    Args:
      inputs: one batch, whose number of rows is shown as None in shapes.
    """

    def __init__(self, inputs: PyTree):
        leaves = jax.tree.leaves(inputs)
        self._rows = leaves[0].shape[0] if leaves and leaves[0].ndim else None
        self._layers: dict[Path, tuple[str, str]] = {}

    @property
    def paths(self) -> list[Path]:
        """The paths of the layers."""
        return list(self._layers)

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `CallObserver`."""
        return jax.eval_shape(function, *args)

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        """See `CallObserver`."""
        self._layers.setdefault(path, (type_name, ""))
        return arguments

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        """See `CallObserver`."""
        self._layers[path] = (self._layers[path][0], shapes_text(outputs, self._rows))
        return outputs

    def rows(self, params: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> list[LayerRow]:
        """Returns a row for each layer that holds numbers itself or calls no other.

        Args:
          params: the parameters, as nested dicts whose keys are the layers' names.
          states: dicts of the same structure with the values that are not trained.
        """
        trainable = self._counts_by_layer(params)
        fixed = [self._counts_by_layer(state) for state in states]
        rows = []
        for path, (type_name, output_shape) in self._layers.items():
            count = trainable[path] + sum(counts[path] for counts in fixed)
            calls_others = any(other[:len(path)] == path and other != path for other in self._layers)
            if count or not calls_others:
                rows.append(LayerRow("/".join(path), type_name, output_shape, count, trainable[path]))
        return rows

    def _counts_by_layer(self, values: Mapping[str, Any]) -> dict[Path, int]:
        counts = dict.fromkeys(self._layers, 0)
        for path, value in flatten_dict(values).items():
            owner = next((path[:end] for end in range(len(path), -1, -1) if path[:end] in counts), None)
            if owner is not None:
                counts[owner] += sum(leaf.size for leaf in jax.tree.leaves(value))
        return counts


def shapes_text(values: PyTree, rows: int | None) -> str:
    """Returns the shapes of arrays, with None for the batch dimension of so many rows.

    >>> shapes_text([jax.ShapeDtypeStruct((8, 3), "float32"), jax.ShapeDtypeStruct((), "int32")], 8)
    '(None, 3), ()'
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(values)]
    return ", ".join(str((None, *shape[1:]) if shape[:1] == (rows,) else shape) for shape in shapes)


def without_frozen(rows: Sequence[LayerRow], frozen: Mapping[str, int]) -> list[LayerRow]:
    """Returns the rows with what is frozen counted as not trained.

    Args:
      rows: the layers of a module.
      frozen: how many numbers each frozen parameter holds, by its path, such as "encoder/Dense_0/kernel".

    >>> without_frozen([LayerRow("head", "Dense", "(None, 2)", 8, 8)], {"head/kernel": 6})[0].trainable
    2
    """
    counts = {row.path: row.trainable for row in rows}
    for path, count in frozen.items():
        names = path.split(SEPARATOR)
        parents = (SEPARATOR.join(names[:end]) for end in range(len(names), -1, -1))
        owner = next((parent for parent in parents if parent in counts), None)
        if owner is not None:
            counts[owner] -= count
    return [row._replace(trainable=counts[row.path]) for row in rows]


def render_summary(rows: Sequence[LayerRow], name: str, total: int, trainable: int, state_count: int) -> list[str]:
    """Returns a summary as lines of text.

    Args:
      rows: the layers.
      name: the model's name.
      total: how many numbers the model holds: parameters, also frozen parameters, and state.
      trainable: how many of these are trained.
      state_count: how many of these are state, such as running averages.

    >>> print("\\n".join(render_summary([LayerRow("head", "Dense", "(None, 2)", 1008, 1008)], "Net", 1008, 1008, 0)))
    Model: Net
    Layer  Type   Output shape  Params  Trainable
    ---------------------------------------------
    head   Dense  (None, 2)      1,008      1,008
    ---------------------------------------------
    Total params: 1,008
    Trainable params: 1,008
    Non-trainable params: 0
    Model state among these: 0
    """
    cells = [("Layer", "Type", "Output shape", "Params", "Trainable")]
    cells += [(row.path or name, row.type_name, row.output_shape, f"{row.params:,}", f"{row.trainable:,}")
              for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) if column >= 3 else cell.ljust(width)
                       for column, (cell, width) in enumerate(zip(line, widths, strict=True))) for line in cells]
    rule = "-" * len(lines[0])
    return [
        f"Model: {name}",
        lines[0],
        rule,
        *lines[1:],
        rule,
        f"Total params: {total:,}",
        f"Trainable params: {trainable:,}",
        f"Non-trainable params: {total - trainable:,}",
        f"Model state among these: {state_count:,}",
    ]
