"""The rows of a model's summary: its layers, and what they hold and compute.

Owns how calls become rows; `table.py` makes tables of them. It must not know Linen or NNX: adapters tell it which
layers were called and how many numbers lie at which path.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.extend.core import ClosedJaxpr

from trainer.compile.cost_analysis import flops_by_scope
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import PyTree
from trainer.modules.summary.calls import CallObserver, Path, shapes_text

_SCOPE = "trainer_layer_"
_SCOPES = re.compile(rf"{_SCOPE}(\d+)_")


class LayerRow(NamedTuple):
    """One layer of a summary.

    Attributes:
      path: the names that lead to the layer, joined by "/"; empty for the module itself.
      type_name: the name of its class.
      output_shape: the shapes of its outputs, with None for the batch dimension.
      params: how many numbers the layer itself holds: parameters and state.
      trainable: how many of these are trained; in a module's own rows, how many are parameters.
      nbytes: the bytes of these numbers, on all devices together if each has a part.
      flops: the floating-point operations of the layer itself for a row of inputs, without those of layers in it that
        have rows of their own: a product counts two for each multiplication, all else one for each number that it
        yields.
      sharding: how parameters are split over a mesh, such as "kernel (None, 'model')"; empty if none is.
    """

    path: str
    type_name: str
    output_shape: str
    params: int
    trainable: int
    nbytes: int = 0
    flops: float | None = None
    sharding: str = ""


class CallRecorder(CallObserver):
    """Collects the layers that are called, in the order in which their calls begin.

    Args:
      inputs: one batch, whose number of rows is shown as None in shapes.
    """

    def __init__(self, inputs: PyTree):
        leaves = jax.tree.leaves(inputs)
        self._rows = leaves[0].shape[0] if leaves and leaves[0].ndim else None
        self._layers: dict[Path, tuple[str, str]] = {}
        self._flops: dict[Path, float] | None = None
        self._open: list[tuple[Path, contextlib.ExitStack]] = []  # calls that have not ended, with their scopes

    @property
    def paths(self) -> list[Path]:
        """The paths of the layers."""
        return list(self._layers)

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `CallObserver`. It also counts the floating-point operations of each layer."""
        try:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        finally:
            self._give_up(0)
        self._count_flops(program)
        return shapes

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        """See `CallObserver`."""
        is_open = [open_path == path for open_path, _ in self._open]
        if any(is_open):  # the call before was given up, as it lacked a random stream
            self._give_up(is_open.index(True))
        self._layers.setdefault(path, (type_name, ""))
        scope = contextlib.ExitStack()
        scope.enter_context(jax.named_scope(f"{_SCOPE}{list(self._layers).index(path)}_"))
        self._open.append((path, scope))
        return arguments

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        """See `CallObserver`."""
        self._give_up(len(self._open) - 1)
        self._layers[path] = (self._layers[path][0], shapes_text(outputs, self._rows))
        return outputs

    def _give_up(self, kept: int) -> None:
        """Leaves the scopes of all calls that have not ended, but for so many."""
        while len(self._open) > kept:
            self._open.pop()[1].close()

    def _count_flops(self, program: ClosedJaxpr) -> None:
        """Notes how many floating-point operations each layer has, in the program in which they were called."""
        paths = list(self._layers)

        def layer_of(scopes: str) -> Path | None:
            found = _SCOPES.findall(scopes)
            return paths[int(found[-1])] if found else None

        self._flops = flops_by_scope(program, layer_of, outer=())

    def rows(self, params: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> list[LayerRow]:
        """Returns a row for each layer that holds numbers itself or calls no other.

        Args:
          params: the parameters, as nested dicts whose keys are the layers' names.
          states: dicts of the same structure with the values that are not trained.
        """
        trainable, trainable_bytes = self._sizes_by_layer(params)
        fixed = [self._sizes_by_layer(state) for state in states]
        shown = []
        for path in self._layers:
            count = trainable[path] + sum(counts[path] for counts, _ in fixed)
            if count or not any(other[:len(path)] == path and other != path for other in self._layers):
                shown.append(path)
        flops = self._flops_of(shown)
        return [LayerRow("/".join(path), *self._layers[path],
                         trainable[path] + sum(counts[path] for counts, _ in fixed), trainable[path],
                         trainable_bytes[path] + sum(sizes[path] for _, sizes in fixed), flops[path])
                for path in shown]

    def _sizes_by_layer(self, values: Mapping[str, Any]) -> tuple[dict[Path, int], dict[Path, int]]:
        """Returns how many numbers, and how many bytes, each layer holds of some values."""
        counts, sizes = dict.fromkeys(self._layers, 0), dict.fromkeys(self._layers, 0)
        for path, value in flatten_dict(values).items():
            owner = _nearest(path, counts)
            if owner is not None:
                counts[owner] += sum(leaf.size for leaf in jax.tree.leaves(value))
                sizes[owner] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
        return counts, sizes

    def _flops_of(self, shown: Sequence[Path]) -> dict[Path, float | None]:
        """Returns the operations of the layers that are shown, for a row, those of others counted where they lie."""
        if self._flops is None:
            return dict.fromkeys(shown)
        total: dict[Path, float | None] = dict.fromkeys(shown, 0.0)
        for path, flops in self._flops.items():
            owner = _nearest(path, total)
            if owner is not None:
                total[owner] = (total[owner] or 0.0) + flops / (self._rows or 1)
        return total


def _nearest(path: Path, known: Container[Path]) -> Path | None:
    """Returns the longest beginning of a path, the path itself included, that is known."""
    return next((path[:end] for end in range(len(path), -1, -1) if path[:end] in known), None)


def without_frozen(rows: Sequence[LayerRow], frozen: Mapping[str, int]) -> list[LayerRow]:
    """Returns the rows with what is frozen counted as not trained.

    Args:
      rows: the layers of a module.
      frozen: how many numbers each frozen parameter holds, by its path, such as "encoder/Dense_0/kernel".

    >>> without_frozen([LayerRow("head", "Dense", "(None, 2)", 8, 8)], {"head/kernel": 6})[0].trainable
    2
    """
    counts = {_names(row.path): row.trainable for row in rows}
    for path, count in frozen.items():
        owner = _nearest(_names(path), counts)
        if owner is not None:
            counts[owner] -= count
    return [row._replace(trainable=counts[_names(row.path)]) for row in rows]


def with_shardings(rows: Sequence[LayerRow], specs: Mapping[str, str]) -> list[LayerRow]:
    """Returns the rows with how parameters are split.

    Args:
      rows: the layers of a module.
      specs: of each parameter that is split, by its path.

    >>> with_shardings([LayerRow("up", "Dense", "(None, 8)", 72, 72)], {"up/kernel": "(None, 'model')"})[0].sharding
    "kernel (None, 'model')"
    """
    found: dict[Path, list[str]] = {_names(row.path): [] for row in rows}
    for name, spec in specs.items():
        path = _names(name)
        owner = _nearest(path, found)
        if owner is not None:
            found[owner].append(f"{SEPARATOR.join(path[len(owner):])} {spec}")
    return [row._replace(sharding=", ".join(found[_names(row.path)])) for row in rows]


def _names(path: str) -> Path:
    return tuple(path.split(SEPARATOR)) if path else ()
