"""Loading Keras's weights into a model: which layer of a file is which layer of the model.

Owns the correspondence of names and layouts. The formats of files are in `keras_files.py`.
"""

from __future__ import annotations

import collections
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.models.weights.keras_files import KerasLayer, keras_layers, read
from trainer.models.weights.model_layers import (
    HasWeights,
    Weight,
    layers_of,
    listed,
    problems_of,
    shapes_of,
    split_at_architecture,
)

# The arrays of a layer in the order in which Keras lists them.
_ORDER = ("depthwise_kernel", "pointwise_kernel", "kernel", "scale", "gamma", "bias", "mean", "var")
_AUTOMATIC = re.compile(r"(conv2d|batch_normalization|dense|separable_conv2d|depthwise_conv2d|normalization|"
                        r"layer_normalization)(?:_(\d+))?")
_OF_KERAS_1 = re.compile(r"(convolution2d|batchnormalization|separableconvolution2d)(?=_\d+$)")
_RENAMED = {"convolution2d": "conv2d", "batchnormalization": "batch_normalization",
            "separableconvolution2d": "separable_conv2d"}
_HEAD = re.compile(r"(.*_)?(predictions|logits|conv_preds|fc1|fc2|head_dense|head_layernorm)|conv_2|classifier")


def load_keras_weights(
    model: HasWeights, path: str | os.PathLike[str], skip_mismatch: bool = False, skip_head: bool = False
) -> None:
    """Loads the weights of a file of Keras into a model of the same architecture.

    A layer of the model takes the weights of the layer of that name in the file: its path, joined by underscores. The
    architecture may be a part of the model, such as the first layer of a `trainer.Sequential`. Nothing is changed if
    anything does not fit.

    Args:
      model: a built `trainer.Model`.
      path: a `.weights.h5`, an `.h5` of `model.save`, one of the files that `keras.applications` downloads, or a
        `.keras` archive.
      skip_mismatch: leave layers of other shapes as they are, with a warning.
      skip_head: leave the classifier as it is, and what else of the model lies outside of the architecture. The file
        may have another classifier, or none.

    Raises:
      ValueError: a layer of the model is not in the file, one of the file not in the model, or shapes differ; all are
        named. Or the file is damaged.
      ImportError: h5py is not installed.
      OSError: the file cannot be read.

    Example:

    >>> model = trainer.Model(models.MobileNetV2(num_classes=2))  # doctest: +SKIP
    >>> model.build(np.zeros((1, 224, 224, 3), np.float32))  # doctest: +SKIP
    >>> models.load_keras_weights(model, "mobilenet_v2.weights.h5", skip_head=True)  # doctest: +SKIP
    """
    path = os.fspath(path)
    state = model.state_shapes()
    layers = layers_of(state.params, state.model_state)
    size = sum(4 * int(np.prod(weight.shape)) for layer in layers.values() for weight in layer.values())
    with keras_layers(path, most_bytes=4 * size + 2**26) as saved:
        in_file = _by_name((layer.name, layer) for layer in saved)
        inside, outside = split_at_architecture(layers, set(in_file))
        own = _by_name(inside.items())
        if skip_head:
            own, in_file = ({name: layer for name, layer in found.items() if not _HEAD.fullmatch(name)}
                            for found in (own, in_file))
            outside = {}
        loaded: dict[int, tuple[Any, tuple[int, ...]]] = {}
        differ: list[str] = []
        for name in own.keys() & in_file.keys():
            matched = _matched(own[name], in_file[name])
            if matched is None:
                differ.append(f"{name} (file: {shapes_of(array.shape for array in _arrays(in_file[name]))}, model: "
                              f"{shapes_of(weight.shape for weight in _in_order(own[name]))})")
            else:
                loaded |= matched
        missing = [*outside, *(name for name in own if name not in in_file)]
        unused = [name for name in in_file if name not in own]
        refused = [] if skip_mismatch else sorted(differ)
        if found := problems_of(missing, unused, refused):
            advice = _advice([*missing, *unused, *refused], skip_head)
            raise ValueError(f"{path!r} does not fit the model: {found}. {advice}")
        weights = model.get_weights()
        for number, (array, axes) in loaded.items():
            weights[number] = read(array).transpose(axes)
    if differ:
        warnings.warn(f"Layers of other shapes than in {path!r} stay as they are: {listed(sorted(differ))}.",
                      stacklevel=2)
    model.set_weights(weights)


def _by_name(layers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns layers by name, where names that Keras made up by counting count from 0."""
    found = [(_OF_KERAS_1.sub(lambda match: _RENAMED[match[1]], name), layer) for name, layer in layers]
    counted: dict[str, list[int]] = collections.defaultdict(list)
    for name, _ in found:
        if automatic := _AUTOMATIC.fullmatch(name):
            counted[automatic[1]].append(int(automatic[2] or 0))
    named = {}
    for name, layer in found:
        if automatic := _AUTOMATIC.fullmatch(name):
            number = sorted(counted[automatic[1]]).index(int(automatic[2] or 0))
            name = f"{automatic[1]}_{number}" if number else automatic[1]
        named[name] = layer
    return named


def _matched(weights: Mapping[str, Weight], layer: KerasLayer) -> dict[int, tuple[Any, tuple[int, ...]]] | None:
    """Returns the file's array for each array of a layer, and how to transpose it; None if shapes differ."""
    arrays, expected = _arrays(layer), _in_order(weights)
    if len(arrays) != len(expected):
        return None
    matched = {}
    for array, weight in zip(arrays, expected, strict=True):
        axes = tuple(range(len(array.shape)))
        if array.shape != weight.shape and len(axes) == 4:
            axes = (0, 1, 3, 2)  # of a depthwise convolution, one channel goes in where in Keras one comes out
        if tuple(array.shape[axis] for axis in axes) != weight.shape:
            return None
        matched[weight.number] = array, axes
    return matched


def _arrays(layer: KerasLayer) -> list[Any]:
    """Returns the arrays of a layer without the count of the batches that a `Normalization` was adapted to."""
    has_count = len(layer.arrays) == 3 and layer.arrays[2].shape == ()
    return layer.arrays[:2] if has_count else layer.arrays


def _in_order(weights: Mapping[str, Weight]) -> list[Weight]:
    return [weights[name] for name in sorted(weights, key=lambda name: _ORDER.index(name) if name in _ORDER else 99)]


def _advice(names: Sequence[str], skip_head: bool) -> str:
    if not skip_head and all(_HEAD.fullmatch(name.partition(" ")[0]) for name in names):
        return "Pass `skip_head=True` to leave the classifier as it is."
    return ("Make the model with the arguments of the one that was saved (`alpha`, `include_top`, `num_classes`); "
            "`skip_head=True` leaves the classifier as it is, and `skip_mismatch=True` layers of other shapes.")
