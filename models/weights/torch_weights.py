"""Loads weights of torchvision's ResNets and of timm's ResNets and ViTs from safetensors files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from trainer.core.arguments import as_path
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.errors import naming_file
from trainer.models.weights.model_layers import (
    HasWeights,
    Weight,
    problems_of,
    shapes_of,
    split_at_architecture,
    weights_of,
)
from trainer.models.weights.safetensors_files import opened

# Layer names in a file, and their names in the model; the first number in a ResNet layer is the stage, from 1.
_RENAMED = (
    (re.compile(r"layer(\d+)\.(\d+)\.(conv|bn)(\d)"), lambda m: f"{_block(m)}_{m[4]}_{m[3]}"),
    (re.compile(r"layer(\d+)\.(\d+)\.downsample\.([01])"), lambda m: f"{_block(m)}_0_{('conv', 'bn')[int(m[3])]}"),
    (re.compile(r"(conv|bn)1"), lambda m: f"conv1_{m[1]}"),
    (re.compile(r"fc"), lambda m: "predictions"),
    (re.compile(r"(?s).*"), lambda m: m[0].replace(".", "_")),  # timm's ViTs
)
_ARRAYS = {"bias": ("bias",), "running_mean": ("mean",), "running_var": ("var",), "weight": ("kernel", "scale")}
_HEADS = ("predictions", "head")
_COUNTER = "num_batches_tracked"
_AXES = {4: (2, 3, 1, 0), 2: (1, 0)}  # transpositions of PyTorch kernels, by number of axes


@explains_arguments
def load_torch_weights(model: HasWeights, path: str | os.PathLike[str], *, skip_head: bool = False) -> None:
    """Loads a safetensors file of torchvision's or timm's weights into a model of the same architecture.

    Supported are `resnet18`, `resnet34` and the larger ResNets of both libraries, for `ResNet18`, `ResNet34` and
    `ResNet50(style="torchvision")`, and timm's `vit_*`, for `ViTS16` and the other ViTs. The architecture may be a part
    of the model, such as the first layer of a `trainer.Sequential`. On any error, the model stays unchanged.

    Args:
      model: a built `trainer.Model`.
      path: the file, such as `model.safetensors` of timm's repositories.
      skip_head: whether to skip the classifier and all layers of the model outside the architecture.

    Raises:
      ValueError: if an array of the model is missing in the file, an array of the file is missing in the model, or
        shapes differ; the message names all such arrays. Also if the file is damaged.
      RuntimeError: if the model is not built.
      TypeError: if `model` is not a `trainer.Model`.
      ImportError: if safetensors is not installed.
      OSError: if the file cannot be read.

    Example:

    >>> model = trainer.Model(models.ViTB16(num_classes=2))  # doctest: +SKIP
    >>> model.build(np.zeros((1, 224, 224, 3), np.float32))  # doctest: +SKIP
    >>> models.load_torch_weights(model, "model.safetensors", skip_head=True)  # doctest: +SKIP
    """
    path = as_path("path", path)
    layers = weights_of(model)
    with naming_file(path), opened(path) as file:
        names = [name for name in file.keys() if not name.endswith(_COUNTER)]  # noqa: SIM118  it is not a mapping
        own, outside = map(_arrays_of, split_at_architecture(layers, {_layer(name) for name in names}))
        in_file = {_name(name, own): name for name in names}
        if skip_head:
            own = {name: weight for name, weight in own.items() if not _in_head(name)}
            in_file = {name: of_file for name, of_file in in_file.items() if not _in_head(name)}
            outside = {}
        shapes = {name: _in_our_order(name, file.get_slice(of_file).get_shape()) for name, of_file in in_file.items()}
        differing = [f"{name} (file: {shapes_of([shapes[name]])}, model: {shapes_of([weight.shape])})"
                     for name, weight in own.items() if name in shapes and shapes[name] != weight.shape]
        missing = [*outside, *(name for name in own if name not in shapes)]
        if found := problems_of(missing, [name for name in shapes if name not in own], differing, "array"):
            advice = "" if skip_head else "; `skip_head=True` leaves the classifier as it is"
            raise ValueError(f"{path!r} does not fit the model: {found}. Make the model with the arguments of the one "
                             f"that was saved (`num_classes`, and `style=\"torchvision\"` of larger ResNets){advice}.")
        received = model.get_weights()
        for name, weight in own.items():
            array = file.get_tensor(in_file[name])
            received[weight.number] = array.transpose(_in_our_order(name, range(array.ndim)))
    model.set_weights(received)


def _arrays_of(layers: dict[str, dict[str, Weight]]) -> dict[str, Weight]:
    return {f"{layer}/{name}" if layer else name: weight
            for layer, weights in layers.items() for name, weight in weights.items()}


def _in_head(name: str) -> bool:
    return name.partition("/")[0] in _HEADS


def _block(match: re.Match[str]) -> str:
    return f"conv{int(match[1]) + 1}_block{int(match[2]) + 1}"


def _layer(name: str) -> str:
    layer = name.rpartition(".")[0]
    return next(rename(match) for pattern, rename in _RENAMED if (match := pattern.fullmatch(layer)))


def _name(name: str, own: dict[str, Any]) -> str:
    """Returns the model's name of an array of the file."""
    last = name.rpartition(".")[2]
    if last not in _ARRAYS:
        return name.replace(".", "_")  # an array outside any layer, such as "pos_embed"
    names = [f"{_layer(name)}/{ours}" for ours in _ARRAYS[last]]
    return next((ours for ours in names if ours in own), names[0])


def _in_our_order(name: str, axes: Sequence[int]) -> tuple[int, ...]:
    """Returns axes of PyTorch, or their sizes, in our order."""
    order = _AXES.get(len(axes), ()) if name.endswith("/kernel") else ()
    return tuple(axes[axis] for axis in order) or tuple(axes)
