"""Loads Keras weights into a model.

Owns the rules for refused and skipped layers. `keras_matching.py` matches the layers, and `keras_files.py` reads the
files.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence

import numpy as np

from trainer.core.arguments import as_path
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.errors import naming_file
from trainer.models.weights.keras_files import keras_layers, read
from trainer.models.weights.keras_matching import Loaded, arrays_of, corresponding, in_order, matched
from trainer.models.weights.model_layers import HasWeights, listed, problems_of, shapes_of, weights_of

_HEAD = re.compile(r"(.*_)?(predictions|logits|conv_preds|fc1|fc2|head_dense|head_layernorm)|conv_2|classifier")


@explains_arguments
def load_keras_weights(
    model: HasWeights, path: str | os.PathLike[str], *, skip_mismatch: bool = False, skip_head: bool = False
) -> None:
    """Loads the weights of a Keras file into a model of the same architecture.

    Layers are matched by name. The name of a layer of the model is its path, joined by underscores. The architecture
    may be a part of the model, such as the first layer of a `trainer.Sequential`, and a part of the file, such as the
    first layer of a `keras.Sequential`. On any error, the model stays unchanged.

    Args:
      model: a built `trainer.Model`.
      path: a `.weights.h5` file, an `.h5` file of `model.save`, a file downloaded by `keras.applications`, or a
        `.keras` archive.
      skip_mismatch: whether to skip layers with other shapes, with a warning.
      skip_head: whether to skip the classifier and all layers of the model outside the architecture. The file may have
        another classifier or none, and additional layers before or after the architecture. An additional convolution
        inside the architecture is still an error.

    Raises:
      ValueError: if a layer of the model is missing in the file, a layer of the file is missing in the model, or shapes
        differ; the message names all such layers. Also if no layer is loaded, several parts of the file fit, or the
        file is damaged.
      RuntimeError: if the model is not built.
      TypeError: if `model` is not a `trainer.Model`.
      ImportError: if h5py is not installed.
      OSError: if the file cannot be read.

    Example:

    >>> model = trainer.Model(models.MobileNetV2(num_classes=2))  # doctest: +SKIP
    >>> model.build(np.zeros((1, 224, 224, 3), np.float32))  # doctest: +SKIP
    >>> models.load_keras_weights(model, "mobilenet_v2.weights.h5", skip_head=True)  # doctest: +SKIP
    """
    path = as_path("path", path)
    layers = weights_of(model)
    size = sum(4 * int(np.prod(weight.shape)) for layer in layers.values() for weight in layer.values())
    with keras_layers(path, most_bytes=4 * size + 2**26) as saved:
        found = corresponding(path, layers, saved)
        own, in_file, outside = found.own, found.in_file, found.outside
        if skip_head:
            own = {name: layer for name, layer in own.items() if not _HEAD.fullmatch(name)}
            outside = {}
        loaded: Loaded = {}
        differ: list[str] = []
        for name in own.keys() & in_file.keys():
            layer, = in_file[name]
            arrays = matched(own[name], layer)
            if arrays is None:
                differ.append(f"{name} (file: {shapes_of(array.shape for array in arrays_of(layer))}, model: "
                              f"{shapes_of(weight.shape for weight in in_order(own[name]))})")
            else:
                loaded |= arrays
        missing = [*outside, *(name for name in own if name not in in_file)]
        unused = [name for name in (*in_file, *found.elsewhere) if name not in own and not (
            skip_head and (_HEAD.fullmatch(name) or found.beside_the_architecture(name)))]
        refused = [] if skip_mismatch else sorted(differ)
        if problems := problems_of(missing, unused, refused):
            advice = _advice([*missing, *unused, *refused], bool(refused), skip_head)
            raise ValueError(f"{path!r} does not fit the model: {problems}. {advice}")
        if not loaded:
            raise ValueError(f"{path!r} has nothing for the model: {len(differ)} of its {len(own)} layers have other "
                             f"shapes: {listed(sorted(differ)) or 'none'}. Make the model with the arguments of the "
                             "one that was saved.")
        weights = model.get_weights()
        with naming_file(path):
            for number, (array, axes) in loaded.items():
                weights[number] = read(array).transpose(axes)
    if differ:
        warnings.warn(f"{len(differ)} of {len(own)} layers have other shapes than in {path!r}, and stay as they are: "
                      f"{listed(sorted(differ))}.", stacklevel=user_stacklevel())
    model.set_weights(weights)


def _advice(names: Sequence[str], differ: bool, skip_head: bool) -> str:
    if not skip_head and all(_HEAD.fullmatch(name.partition(" ")[0]) for name in names):
        return "Pass `skip_head=True` to leave the classifier as it is."
    flags = ["`skip_head=True` leaves the classifier as it is"] * (not skip_head)
    flags += ["`skip_mismatch=True` leaves layers of other shapes as they are"] * differ
    return ("Make the model with the arguments of the one that was saved (`alpha`, `include_top`, `num_classes`)"
            + (f"; {', and '.join(flags)}." if flags else "."))
