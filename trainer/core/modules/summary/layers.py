"""The rows of a model's summary: its layers, with their numbers and operations.

Owns the conversion of calls to rows; `table.py` formats them as tables. It must not know Linen or NNX: adapters report
the layer calls and the arrays by path.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.extend.core import ClosedJaxpr

from trainer.core.compile.cost_analysis import flops_by_scope
from trainer.core.modules.summary.calls import CallObserver, Path, shapes_text
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import PyTree

_SCOPE = "trainer_layer_"
_SCOPES = re.compile(rf"{_SCOPE}(\d+)_")


class LayerRow(NamedTuple):
    """One layer of a summary.

    Attributes:
      path: names that lead to the layer, joined by "/"; empty for the module itself.
      type_name: name of its class.
      output_shape: shapes of its outputs, with None for the batch dimension.
      params: number of values that the layer itself holds: parameters and state.
      trainable: number of these values that are trained; in a module's own rows, the number of parameters.
      nbytes: bytes of these values; if devices hold parts of them, on all devices together.
      flops: floating-point operations of the layer itself per row of inputs, without operations of inner layers that
        have their own rows. A product counts two for each multiplication, all other operations one for each output
        value.
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
    """Collects the called layers, in the order in which their calls begin.

    Args:
      inputs: one batch, whose number of rows becomes None in shapes.
    """

    def __init__(self, inputs: PyTree):
        leaves = jax.tree.leaves(inputs)
        self._rows = leaves[0].shape[0] if leaves and leaves[0].ndim else None
        self._layers: dict[Path, tuple[str, str]] = {}
        self._flops: dict[Path, float] | None = None
        self._open: list[tuple[Path, contextlib.ExitStack]] = []  # open calls, with their scopes

    @property
    def paths(self) -> list[Path]:
        """Paths of the layers."""
        return list(self._layers)

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `CallObserver`. Also counts the floating-point operations of each layer."""
        try:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        finally:
            self._give_up(0)
        self._count_flops(program)
        return shapes

    def begin(self, path: Path, type_name: str, arguments: PyTree) -> PyTree:
        is_open = [open_path == path for open_path, _ in self._open]
        if any(is_open):  # the previous call was given up, because it lacked a random stream
            self._give_up(is_open.index(True))
        self._layers.setdefault(path, (type_name, ""))
        scope = contextlib.ExitStack()
        scope.enter_context(jax.named_scope(f"{_SCOPE}{list(self._layers).index(path)}_"))
        self._open.append((path, scope))
        return arguments

    def end(self, path: Path, outputs: PyTree) -> PyTree:
        self._give_up(len(self._open) - 1)
        self._layers[path] = (self._layers[path][0], shapes_text(outputs, self._rows))
        return outputs

    def _give_up(self, kept: int) -> None:
        """Leaves the scopes of all open calls but the first `kept`."""
        while len(self._open) > kept:
            self._open.pop()[1].close()

    def _count_flops(self, program: ClosedJaxpr) -> None:
        """Counts the floating-point operations of each layer in the program."""
        paths = list(self._layers)

        def layer_of(scopes: str) -> Path | None:
            found = _SCOPES.findall(scopes)
            return paths[int(found[-1])] if found else None

        self._flops = flops_by_scope(program, layer_of, outer=())

    def rows(self, params: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> list[LayerRow]:
        """Returns a row for each layer that holds values itself or calls no other layer.

        Args:
          params: parameters, as nested dicts whose keys are the names of the layers.
          states: dicts of the same structure with the non-trainable values.
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
        """Returns the number of values and the number of bytes that each layer holds."""
        counts, sizes = dict.fromkeys(self._layers, 0), dict.fromkeys(self._layers, 0)
        for path, value in flatten_dict(values).items():
            owner = _nearest(path, counts)
            if owner is not None:
                counts[owner] += sum(leaf.size for leaf in jax.tree.leaves(value))
                sizes[owner] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
        return counts, sizes

    def _flops_of(self, shown: Sequence[Path]) -> dict[Path, float | None]:
        """Returns the operations per row of the shown layers, including the operations of hidden layers inside them."""
        if self._flops is None:
            return dict.fromkeys(shown)
        total: dict[Path, float | None] = dict.fromkeys(shown, 0.0)
        for path, flops in self._flops.items():
            owner = _nearest(path, total)
            if owner is not None:
                total[owner] = (total[owner] or 0.0) + flops / (self._rows or 1)
        return total


def _nearest(path: Path, known: Container[Path]) -> Path | None:
    """Returns the longest known prefix of a path, which may be the path itself."""
    return next((path[:end] for end in range(len(path), -1, -1) if path[:end] in known), None)


def without_frozen(rows: Sequence[LayerRow], frozen: Mapping[str, int]) -> list[LayerRow]:
    """Returns the rows with frozen parameters counted as not trained.

    Args:
      rows: the layers of a module.
      frozen: number of values of each frozen parameter, by its path, such as "encoder/Dense_0/kernel".

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
    """Returns the rows with the shardings of their parameters.

    Args:
      rows: the layers of a module.
      specs: sharding of each split parameter, by its path.

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
