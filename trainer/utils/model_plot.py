"""Pictures of models: their layers and the data flow between them, drawn by Graphviz.

Owns the appearance of the graph, and the call of Graphviz. `layer_graph.py` owns its content.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
from typing import Any

from trainer.core import arguments, replica_context
from trainer.core.ambient.notebook import is_in_notebook
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import wrong_type
from trainer.core.tree_paths import named_leaves
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.forward import trained_names
from trainer.engine.model.model import Model
from trainer.utils.layer_graph import Layer, LayerGraph, layer_graph

_FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "dot")
_DIRECTIONS = ("TB", "BT", "LR", "RL")
_TIMEOUT_SECS = 300


@explains_arguments
def plot_model(
    model: Model, to_file: str | os.PathLike[str] = "model.png", show_shapes: bool = False, show_dtype: bool = False,
    show_layer_names: bool = False, rankdir: str = "TB", expand_nested: bool = False, dpi: int = 200,
    show_trainable: bool = False,
) -> Any:
    """Draws the layers of a model and the data flow between them, in an evaluation, to a file.

    A box is a layer that the model calls. An arrow leads to the next layer that uses its output, also through
    operations that are not layers, such as an addition, or the plain functions of a `Sequential`.

    Args:
      model: a built model: Linen, NNX, `Sequential`, or several modules.
      to_file: path of the file; its suffix sets the format: `.png`, `.svg`, `.pdf`, `.jpg`, or `.dot`, Graphviz's text,
        which needs no Graphviz.
      show_shapes: whether to show the input and output shapes.
      show_dtype: whether to show the dtypes.
      show_layer_names: whether to show the layers' paths, which name the parameters.
      rankdir: direction: "TB" from top to bottom, "LR" from left to right; also "BT" and "RL".
      expand_nested: whether to draw layers that call others as frames around these.
      dpi: dots per inch of raster images.
      show_trainable: whether to show if a layer's parameters are trainable (T) or frozen (NT).

    Returns:
      A displayable picture in a notebook; otherwise None.

    Raises:
      TypeError: for an argument of a wrong type.
      ValueError: for an unknown suffix or direction.
      RuntimeError: if the model is not built, or Graphviz fails.
      ImportError: without Graphviz, which pip does not install; the message says how to install it.

    Source: https://keras.io/api/utils/model_plotting_utils/#plot_model-function.
    """
    path = arguments.as_path("to_file", to_file)
    kind = os.path.splitext(path)[1].removeprefix(".").lower()
    if kind not in _FORMATS:
        raise ValueError(f"`to_file` must be a path that ends with .{', .'.join(_FORMATS)}. Received: "
                         f"to_file={path!r}.")
    text = model_to_dot(model, show_shapes, show_dtype, show_layer_names, rankdir, expand_nested, dpi, show_trainable)
    _write(path, text.encode() if kind == "dot" else _rendered(text, kind))
    if kind in ("png", "jpg", "jpeg", "svg") and is_in_notebook():
        display = sys.modules["IPython"].display
        return display.SVG(path) if kind == "svg" else display.Image(filename=path)
    return None


@explains_arguments
def model_to_dot(
    model: Model, show_shapes: bool = False, show_dtype: bool = False, show_layer_names: bool = False,
    rankdir: str = "TB", expand_nested: bool = False, dpi: int = 200, show_trainable: bool = False,
) -> str:
    """Returns the layers of a model and the data flow between them in Graphviz's language DOT.

    Keras returns an object of the package pydot; `pydot.graph_from_dot_data` makes it from the text.

    Args:
      model: a built model, as in `plot_model`.
      show_shapes: as in `plot_model`.
      show_dtype: as in `plot_model`.
      show_layer_names: as in `plot_model`.
      rankdir: as in `plot_model`.
      expand_nested: as in `plot_model`.
      dpi: as in `plot_model`.
      show_trainable: as in `plot_model`.

    >>> import numpy as np
    >>> from flax import linen as nn
    >>> from trainer.engine.model.model import Sequential
    >>> model = Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    >>> model.build(np.zeros((1, 3)))
    >>> print(model_to_dot(model))  # doctest: +ELLIPSIS
    digraph "sequential" {
    ...
    n0 -> n1;
    n1 -> n2;
    }

    Source: https://keras.io/api/utils/model_plotting_utils/#model_to_dot-function.
    """
    if not isinstance(model, Model):
        raise wrong_type("model", model, "a `trainer.Model`")
    arguments.require_bool(show_shapes=show_shapes, show_dtype=show_dtype, show_layer_names=show_layer_names,
                           expand_nested=expand_nested, show_trainable=show_trainable)
    arguments.check_word("rankdir", rankdir, _DIRECTIONS)
    trained, held = trained_names(core_of(model)), core_of(model).state
    inputs, all_parameters = held.inputs, named_leaves(held.current.params)
    with replica_context.enter(replica_context.context_outside(inputs)):
        graph = layer_graph(core_of(model).module, inputs, expand_nested)

    def label(layer: Layer) -> str:
        rows = [f"{layer.name or model.name} ({layer.type_name})" if show_layer_names else layer.type_name]
        if show_shapes:
            rows += [f"Input shape: {layer.input_shapes}"] if layer.type_name != "Input" else []
            rows += [f"Output shape: {layer.output_shapes}"]
        if show_dtype:
            rows += [f"Output dtype: {layer.output_dtypes}"]
        if show_trainable and (names := parameters(layer)):
            rows += ["Trainable: " + "/".join(sorted({"T" if name in trained else "NT" for name in names},
                                                     reverse=True))]
        return _table(rows)

    def parameters(layer: Layer) -> list[str]:
        return [name for name in all_parameters if not layer.name or name.startswith(f"{layer.name}/")] + [
            name for inner in graph.layers.values() if inner.outer == layer.name != "" for name in parameters(inner)]

    lines = [f"digraph {_quoted(model.name)} {{",
             f'graph [rankdir={rankdir}, dpi={arguments.as_count("dpi", dpi)}, fontname="Helvetica"];',
             'node [shape=plaintext, fontname="Helvetica", margin=0];', 'edge [color="#555555"];']
    numbers = {name: f"n{number}" for number, name in enumerate([*graph.inputs, *graph.drawn])}
    lines += [f"{numbers[name]} [label={label(layer)}];" for name, layer in graph.inputs.items()]
    lines += _boxes(graph, None, numbers, label) if expand_nested else [
        f"{numbers[name]} [label={label(graph.layers[name])}];" for name in graph.drawn]
    lines += [f"{numbers[source]} -> {numbers[target]};" for source, target in graph.edges]
    return "\n".join([*lines, "}"])


def _boxes(graph: LayerGraph, outer: str | None, numbers: dict[str, str], label: Any) -> list[str]:
    """Returns the DOT lines of the layers that a layer calls; layers that call others are frames."""
    lines = []
    for name, layer in graph.layers.items():
        if layer.outer != outer:
            continue
        if name in numbers:
            lines.append(f"{numbers[name]} [label={label(layer)}];")
        elif outer is None:
            lines += _boxes(graph, name, numbers, label)
        else:
            lines += [f"subgraph {_quoted('cluster_' + name)} {{", f"label={label(layer)}; style=rounded;",
                      *_boxes(graph, name, numbers, label), "}"]
    return lines


def _table(rows: list[str]) -> str:
    title, *others = map(html.escape, rows)
    cells = [f'<tr><td bgcolor="#222222"><font color="white"><b>{title}</b></font></td></tr>',
             *(f"<tr><td>{row}</td></tr>" for row in others)]
    return f'<<table border="0" cellborder="1" cellspacing="0" cellpadding="6">{"".join(cells)}</table>>'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _rendered(text: str, kind: str) -> bytes:
    program = shutil.which("dot")
    if program is None:
        raise ImportError(
            "Pictures of models are drawn by Graphviz's program `dot`, which is not installed. Install it with the "
            "system's packages (`apt install graphviz`, `brew install graphviz`, `conda install graphviz`); or write "
            "its text with `to_file=\"model.dot\"`, which needs no program.")
    done = subprocess.run([program, f"-T{kind}"], input=text.encode(), capture_output=True, timeout=_TIMEOUT_SECS,
                          check=False)
    if done.returncode:
        raise RuntimeError(f"Graphviz failed with exit code {done.returncode}: "
                           f"{done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _write(path: str, contents: bytes) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(contents)
