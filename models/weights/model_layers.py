"""The layers of a model by path, and the error messages for layers that do not match a file.

Owns the view of a model that the weight loaders share.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from trainer.core.errors import brief

_SHOWN = 5  # maximum number of names in a message


class HasWeights(Protocol):
    """A `trainer.Model`, or any object with these methods."""

    @property
    def module(self) -> Any:
        """The Flax module."""

    @property
    def weights(self) -> Sequence[Any]:
        """The arrays of `params` and `model_state`, each with a `path`, a `dtype` and a method `numpy`."""

    @property
    def current_run(self) -> Any:
        """An object with the context manager `showing_averages`, in which `weights` are moving averages, if any."""

    def state_shapes(self) -> Any:
        """Returns an object with `params` and `model_state`, trees of shapes."""

    def get_weights(self) -> list[np.ndarray]:
        """Returns the arrays of `params` and `model_state`."""

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Replaces the arrays of `params` and `model_state`."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of the model: its index among all arrays, and its shape."""

    number: int
    shape: tuple[int, ...]


Layers = dict[tuple[str, ...], dict[str, Weight]]


def weights_of(model: HasWeights) -> Layers:
    """Returns the layers of a model.

    Raises:
      TypeError: if `model` is not a `trainer.Model`.
      RuntimeError: if `model` is not built.
    """
    if not hasattr(model, "state_shapes"):
        raise TypeError(f"`model` must be a `trainer.Model`. Received: a value of type {type(model).__name__}. A Flax "
                        "module becomes one by `trainer.Model(module)`.")
    if not getattr(model, "built", True):
        raise RuntimeError("The model is not built, so it has no weights yet. Call `model.build(x)` first, with some "
                           "rows of inputs.")
    state = model.state_shapes()
    return layers_of(state.params, state.model_state)


def layers_of(params: Mapping[str, Any], model_state: Mapping[str, Any]) -> Layers:
    """Returns the layers of a model, from the trees of its parameters and its state."""
    layers: Layers = collections.defaultdict(dict)
    leaves = jax.tree_util.tree_leaves_with_path((params, model_state))
    for number, (path, leaf) in enumerate(leaves):
        part, *names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if part == "1":
            names = names[1:]  # without the collection
        layers[tuple(names[:-1])][names[-1]] = Weight(number, tuple(leaf.shape))
    return dict(layers)


def split_at_architecture(
    layers: Layers, names: set[str]
) -> tuple[dict[str, dict[str, Weight]], dict[str, dict[str, Weight]]]:
    """Returns the layers inside and outside the part of a model that contains most of the names.

    On a tie, the largest part is used. Names of inside layers are paths within the part, joined by "_"; names of
    outside layers are full paths, joined by "/".
    """
    prefixes = sorted({path[:length] for path in layers for length in range(len(path))}, key=len)

    def inside(prefix: tuple[str, ...]) -> dict[str, dict[str, Weight]]:
        return {"_".join(path[len(prefix):]): weights for path, weights in layers.items()
                if path[:len(prefix)] == prefix}

    prefix = max(prefixes, key=lambda prefix: len(inside(prefix).keys() & names), default=())
    return inside(prefix), {"/".join(path): weights for path, weights in layers.items()
                            if path[:len(prefix)] != prefix}


def problems_of(
    missing: Sequence[str], unused: Sequence[str], differing: Sequence[str], what: str = "layer",
    show: Callable[[Sequence[str]], str] | None = None,
) -> str:
    """Returns a sentence that lists missing, unused and differing layers; `show` lists names, instead of `listed`."""
    problems = {(f"{what} is not in the file", f"{what}s are not in the file"): missing,
                (f"{what} of the file is not in the model", f"{what}s of the file are not in the model"): unused,
                (f"{what} has another shape", f"{what}s have other shapes"): differing}
    return "; ".join(f"{len(names)} {one if len(names) == 1 else several}: {(show or listed)(names)}"
                     for (one, several), names in problems.items() if names)


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and the number of omitted names."""
    more = len(names) - _SHOWN
    return ", ".join(map(brief, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def shapes_of(shapes: Iterable[Sequence[int]]) -> str:
    """Returns shapes as text."""
    return ", ".join(str(tuple(shape)) for shape in shapes)
