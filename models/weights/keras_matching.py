"""Matches the layers of a Keras file to the layers of a model, by name, part of the file and shape."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.models.weights.keras_files import KerasLayer
from trainer.models.weights.model_layers import Layers, Weight, listed, split_at_architecture

# The arrays of a layer in Keras's order.
_ORDER = ("depthwise_kernel", "pointwise_kernel", "kernel", "scale", "gamma", "bias", "mean", "var")
_RANK = {name: rank for rank, name in enumerate(_ORDER)}
_AUTOMATIC = re.compile(r"(conv2d|batch_normalization|dense|separable_conv2d|depthwise_conv2d|normalization|"
                        r"layer_normalization)(?:_(\d+))?")
_OF_KERAS_1 = re.compile(r"(convolution2d|batchnormalization|separableconvolution2d)(?=_\d+$)")
_RENAMED = {"convolution2d": "conv2d", "batchnormalization": "batch_normalization",
            "separableconvolution2d": "separable_conv2d"}
_CONVOLUTION = 4  # number of axes of a kernel

# The file's array and its transposition, by the number of the array in the model.
Loaded = dict[int, tuple[Any, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """The layers of a model and the layers of a file.

    Attributes:
      own: layers of the architecture, by Keras name.
      outside: other layers of the model, by path.
      in_file: layers of the file's part with the architecture, by name; a name may have several layers.
      elsewhere: names of the other layers of the file.
    """

    own: dict[str, dict[str, Weight]]
    outside: dict[str, dict[str, Weight]]
    in_file: dict[str, list[KerasLayer]]
    elsewhere: list[str]

    @property
    def fitting(self) -> int:
        """Number of layers with a unique match of equal name and shapes in the file."""
        return sum(name in self.own and len(found) == 1 and matched(self.own[name], found[0]) is not None
                   for name, found in self.in_file.items())

    def beside_the_architecture(self, name: str) -> bool:
        """Returns whether an unmatched layer of the file may come before or after the architecture.

        A convolution with an explicit name, in the file's part with the architecture, indicates a different
        architecture, such as a deeper variant.
        """
        with_own = {layer.part for own in self.own for layer in self.in_file.get(own, ())}
        return name in self.elsewhere or bool(_AUTOMATIC.fullmatch(name)) or all(
            layer.part not in with_own or all(len(array.shape) != _CONVOLUTION for array in layer.arrays)
            for layer in self.in_file[name])


def corresponding(path: str, layers: Layers, saved: Sequence[KerasLayer]) -> Correspondence:
    """Matches the layers of a model to the file, or to the part of the file that fits best.

    Args:
      path: path of the file, for error messages.
      layers: layers of the model.
      saved: layers of the file.

    Raises:
      ValueError: if several parts of the file fit, or several layers of the file have the name of a layer of the model.
    """
    found = _beside(layers, saved, [])
    names = sorted({layer.part for layer in saved})
    parts = {name: _beside(layers, [layer for layer in saved if layer.part == name],
                           [layer.name for layer in saved if layer.part != name]) for name in names}
    most = max(part.fitting for part in parts.values())
    best = [name for name, part in parts.items() if part.fitting == most]
    if most > 0 and len(names) > 1 and most >= found.fitting:
        if len(best) > 1:
            raise ValueError(f"{path!r} has {len(best)} parts that fit the architecture equally well: "
                             f"{listed([repr(name) for name in best])}. Save the one that is meant alone, in Keras: "
                             "`model.get_layer(name).save_weights(path)`.")
        found = parts[best[0]]
    repeated = [name for name in found.own if len(found.in_file.get(name, ())) > 1]
    if repeated:
        raise ValueError(f"{path!r} has several layers of one name: {listed(repeated)}. Save the part with the "
                         "architecture alone, in Keras: `model.get_layer(name).save_weights(path)`.")
    return found


def _beside(layers: Layers, saved: Sequence[KerasLayer], elsewhere: list[str]) -> Correspondence:
    in_file = _by_name((layer.name, layer) for layer in saved)
    inside, outside = split_at_architecture(layers, set(in_file))
    own = {name: found[0] for name, found in _by_name(inside.items()).items()}
    return Correspondence(own, outside, in_file, elsewhere)


def _by_name(layers: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Returns layers by name, with Keras's automatic numbering restarted at 0."""
    found = [(_OF_KERAS_1.sub(lambda match: _RENAMED[match[1]], name), layer) for name, layer in layers]
    counted: dict[str, list[int]] = collections.defaultdict(list)
    for name, _ in found:
        if automatic := _AUTOMATIC.fullmatch(name):
            counted[automatic[1]].append(int(automatic[2] or 0))
    named = collections.defaultdict(list)
    for name, layer in found:
        if automatic := _AUTOMATIC.fullmatch(name):
            number = sorted(counted[automatic[1]]).index(int(automatic[2] or 0))
            name = f"{automatic[1]}_{number}" if number else automatic[1]
        named[name].append(layer)
    return dict(named)


def matched(weights: Mapping[str, Weight], layer: KerasLayer) -> Loaded | None:
    """Returns the file's array and transposition for each array of a layer, or None if shapes differ."""
    arrays, expected = arrays_of(layer), in_order(weights)
    if len(arrays) != len(expected):
        return None
    found = {}
    for array, weight in zip(arrays, expected, strict=True):
        axes = tuple(range(len(array.shape)))
        if len(axes) == _CONVOLUTION == len(weight.shape) and array.shape[3] == 1 == weight.shape[2]:
            axes = (0, 1, 3, 2)  # depthwise kernel: the axis of size 1 is the input here, and the output in Keras
        if tuple(array.shape[axis] for axis in axes) != weight.shape:
            return None
        found[weight.number] = array, axes
    return found


def arrays_of(layer: KerasLayer) -> list[Any]:
    """Returns the arrays of a layer, without the batch count of an adapted `Normalization`."""
    has_count = len(layer.arrays) == 3 and layer.arrays[2].shape == ()
    return layer.arrays[:2] if has_count else layer.arrays


def in_order(weights: Mapping[str, Weight]) -> list[Weight]:
    """Returns the arrays of a layer of the model, in Keras's order."""
    return [weights[name] for name in sorted(weights, key=lambda name: _RANK.get(name, len(_RANK)))]
