"""Data flow between the layers of a module, read from a trace of its call.

Owns the graph: its nodes are layers, and its edges the data flow between them, also through additions and other
operations. `model_plot.py` draws it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from trainer.core.compile.traces.equations import jaxpr_of, program_of, scan_counts
from trainer.core.modules import CallObserver, FunctionalModule, shapes_text
from trainer.core.tree_paths import SEPARATOR, path_name
from trainer.core.types import PyTree

_TAG = "trainer-layer"
Sources = frozenset[str]


@dataclasses.dataclass
class Layer:
    """A layer of the graph, or an input of the model.

    Attributes:
      name: path, such as "encoder/Dense_0"; a layer with several calls occurs once.
      type_name: name of the class; "Input" for an input.
      outer: name of the calling layer, or None.
      input_shapes, output_shapes: shapes, with None for the batch dimension.
      input_dtypes, output_dtypes: dtypes of the same arrays.
      calls_others: whether the layer calls other layers.
    """

    name: str
    type_name: str
    outer: str | None
    input_shapes: str = ""
    output_shapes: str = ""
    input_dtypes: str = ""
    output_dtypes: str = ""
    calls_others: bool = False


@dataclasses.dataclass
class LayerGraph:
    """The layers of a module, in the order of their calls, and the data flow between them.

    Attributes:
      inputs: inputs of the model, by name.
      layers: all layers, by name, including layers that call others.
      drawn: names of the layers that edges connect: the innermost layers, or the layers that the model itself calls.
      edges: pairs of names, of inputs and of drawn layers.
    """

    inputs: dict[str, Layer]
    layers: dict[str, Layer]
    drawn: list[str]
    edges: list[tuple[str, str]]


def layer_graph(module: FunctionalModule, inputs: PyTree, nested: bool) -> LayerGraph:
    """Returns the graph of a module's layers in an evaluation, without computing or allocating anything.

    Args:
      module: module.
      inputs: a batch, or the same structure of `jax.ShapeDtypeStruct`.
      nested: whether to connect the innermost layers instead of the layers that the module itself calls.
    """
    calls = _Calls(inputs)
    module.observe_calls(inputs, calls)
    layers = calls.layers
    roots = [name for name, layer in layers.items() if layer.outer is None]
    if nested:
        drawn = [name for name, layer in layers.items() if not layer.calls_others]
    else:
        drawn = [name for name, layer in layers.items()
                 if layer.outer in roots or (name in roots and not layer.calls_others)]
    edges: dict[tuple[str, str], None] = {}
    for jaxpr in calls.jaxprs:
        _Flow(set(drawn), edges).through(jaxpr, [frozenset()] * len(jaxpr.invars))
    return LayerGraph(calls.inputs, layers, drawn, list(edges))


class _Calls(CallObserver):
    """Marks the beginning and end of each layer's call in the trace."""

    def __init__(self, inputs: PyTree):
        leaves = jax.tree.leaves(inputs)
        self._rows = leaves[0].shape[0] if leaves and leaves[0].ndim else None
        self._open: list[str] = []
        self.inputs: dict[str, Layer] = {}
        self.layers: dict[str, Layer] = {}
        self.jaxprs: list[Any] = []

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self.jaxprs.append(closed.jaxpr)
        return shapes

    def begin(self, path: tuple[str, ...], type_name: str, arguments: PyTree) -> PyTree:
        name = SEPARATOR.join(path)
        if name in self._open:  # the call before was given up, as it lacked a random stream
            del self._open[self._open.index(name):]
        outer = self._open[-1] if self._open else None
        if outer is None:
            arguments = jax.tree_util.tree_map_with_path(self._marked_input(name), arguments)
        else:
            self.layers[outer].calls_others = True
        found = list(filter(_is_traced, jax.tree.leaves(arguments)))
        self.layers.setdefault(name, Layer(name, type_name, outer, shapes_text(found, self._rows), "",
                                           _dtypes(found)))
        self._open.append(name)
        return _marked(arguments, "begin", name)

    def end(self, path: tuple[str, ...], outputs: PyTree) -> PyTree:
        name = self._open.pop()
        found = list(filter(_is_traced, jax.tree.leaves(outputs)))
        self.layers[name].output_shapes, self.layers[name].output_dtypes = (
            shapes_text(found, self._rows), _dtypes(found))
        return _marked(outputs, "end", name)

    def _marked_input(self, root: str) -> Callable[[Any, Any], Any]:
        def marked(path: Any, leaf: Any) -> Any:
            if not _is_traced(leaf):
                return leaf
            _, *keys = path  # of `(args, kwargs)`
            name = SEPARATOR.join(filter(None, (root, "input", path_name(keys))))
            shape, dtype = shapes_text(leaf, self._rows), _dtypes([leaf])
            self.inputs[name] = Layer(name, "Input", None, shape, shape, dtype, dtype)
            return _marked(leaf, "input", name)

        return marked


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.core.Tracer) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _marked(values: PyTree, kind: str, name: str) -> PyTree:
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, f"{_TAG}:{kind}:{name}") if _is_traced(leaf) else leaf,
                        values)


def _dtypes(leaves: Sequence[Any]) -> str:
    return ", ".join(str(leaf.dtype) for leaf in leaves)


@dataclasses.dataclass
class _Flow:
    """Layers that the values of a traced program come from.

    Attributes:
      drawn: layers whose marks count; marks of other layers are ignored.
      edges: edges found so far, in order.
    """

    drawn: set[str]
    edges: dict[tuple[str, str], None]

    def through(self, jaxpr: Jaxpr, inputs: Sequence[Sources]) -> list[Sources]:
        """Returns the sources of a program's outputs, given the sources of its inputs."""
        found: dict[Any, Sources] = dict(zip(jaxpr.invars, inputs, strict=True))

        def sources(variable: Any) -> Sources:
            return frozenset() if hasattr(variable, "val") else found.get(variable, frozenset())

        for equation in jaxpr.eqns:
            outputs = self._of(equation, list(map(sources, equation.invars)))
            found |= dict(zip(equation.outvars, outputs, strict=True))
        return list(map(sources, jaxpr.outvars))

    def _of(self, equation: JaxprEqn, inputs: list[Sources]) -> list[Sources]:
        name, count = equation.primitive.name, len(equation.outvars)
        together = frozenset().union(*inputs)
        mark = str(equation.params.get("name", "")).split(":", 2) if name == "name" else ()
        if len(mark) == 3 and mark[0] == _TAG:
            return [self._marked(mark[1], mark[2], together)]
        if name == "cond":
            branches = [self.through(jaxpr_of(branch), inputs[1:]) for branch in equation.params["branches"]]
            return [frozenset().union(inputs[0], *results) for results in zip(*branches, strict=True)]
        if name == "while":
            body = inputs[equation.params["cond_nconsts"]:]
            return self._repeated(equation.params["body_jaxpr"], body, equation.params["body_nconsts"], count)
        if name == "scan":
            constants, carried = scan_counts(equation)
            return self._repeated(program_of(equation), inputs, constants, carried)
        if "jaxpr" in equation.params or "call_jaxpr" in equation.params:
            return self._inside(program_of(equation), inputs, count) or [together] * count
        return [together] * count

    def _repeated(self, program: ClosedJaxpr | Jaxpr, inputs: list[Sources], constants: int,
                  carried: int) -> list[Sources]:
        """Returns the sources of a loop's outputs, whose first values return as inputs after the constants."""
        while True:
            outputs = self.through(jaxpr_of(program), inputs)
            back = [one | other for one, other in zip(inputs[constants:constants + carried], outputs[:carried],
                                                      strict=True)]
            if back == inputs[constants:constants + carried]:
                return [*back, *outputs[carried:]]
            inputs = [*inputs[:constants], *back, *inputs[constants + carried:]]

    def _inside(self, program: ClosedJaxpr | Jaxpr, inputs: list[Sources], count: int) -> list[Sources] | None:
        jaxpr = jaxpr_of(program)
        if len(jaxpr.invars) != len(inputs) or len(jaxpr.outvars) != count:
            return None
        return self.through(jaxpr, inputs)

    def _marked(self, kind: str, name: str, sources: Sources) -> Sources:
        if kind == "begin":
            if name in self.drawn:
                self.edges |= dict.fromkeys((source, name) for source in sorted(sources) if source != name)
            return sources
        return frozenset({name}) if kind == "input" or name in self.drawn else sources
