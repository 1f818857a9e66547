"""A layer of a model by its name, with its weights.

Owns which weights are a layer's, and which layer a name or a number means.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from trainer.core import errors
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import ArrayLike
from trainer.model.views.variables import ModelVariable
from trainer.modules.summary import ModuleLayer

Write = Callable[[Sequence[ModelVariable], Sequence[ArrayLike]], None]


class ModelLayer:
    """A layer of a model: a module that its module holds, or a function of a stack.

    Args:
      layer: its path and its module.
      inside: the layers in it, and in these.
      variables: returns the weights of the model with the paths of their layers.
      write: replaces some weights at once.

    Attributes:
      path: the names that lead to it, such as "encoder/Dense_0", as patterns of `freeze` have them.
      module: the Flax module or the function. A Linen module has no weights, and is one that was made with the same
        arguments; an NNX module is the user's own, whose arrays are those of the end of the last `fit`.

    Example:
      >>> model.get_layer("Dense_0").set_weights([bias, kernel])  # doctest: +SKIP
    """

    __slots__ = ("_inside", "_variables", "_write", "module", "path")

    def __init__(self, layer: ModuleLayer, inside: Sequence[ModuleLayer],
                 variables: Callable[[], list[tuple[str, ModelVariable]]], write: Write):
        self.path, self.module = layer
        self._inside, self._variables, self._write = inside, variables, write

    @property
    def name(self) -> str:
        """Its path, by which `get_layer` finds it; of a model whose module is a single layer, the name of its class."""
        return self.path or type(self.module).__name__

    @property
    def layers(self) -> list[ModelLayer]:
        """The layers that this layer holds itself."""
        return outermost(self._inside, self._variables, self._write)

    @property
    def weights(self) -> list[ModelVariable]:
        """Its weights, with those of layers in it: its parameters, then its state, each sorted by path."""
        below = self.path and f"{self.path}{SEPARATOR}"
        return [variable for path, variable in self._variables() if path.startswith(below)]

    variables = weights

    @property
    def trainable_weights(self) -> list[ModelVariable]:
        """Those of its weights that are trained."""
        return [weight for weight in self.weights if weight.trainable]

    trainable_variables = trainable_weights

    @property
    def non_trainable_weights(self) -> list[ModelVariable]:
        """Those of its weights that are frozen, and its state, such as running averages."""
        return [weight for weight in self.weights if not weight.trainable]

    non_trainable_variables = non_trainable_weights

    @property
    def trainable(self) -> bool:
        """Whether any of its weights is trained. Set it by `compile(freeze=[layer.path])`."""
        return bool(self.trainable_weights)

    @trainable.setter
    def trainable(self, value: object) -> NoReturn:
        raise AttributeError(f"`trainable` of the layer {self.path!r} cannot be set: `compile` says what is trained. "
                             f"Call `compile(..., freeze=[{self.path!r}])` for layers that are to stay as they are, "
                             "without it to train all.")

    def count_params(self) -> int:
        """Returns the number of its weights."""
        return sum(weight.size for weight in self.weights)

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of its weights, in the order of `weights`."""
        return [weight.numpy() for weight in self.weights]

    def set_weights(self, weights: Sequence[ArrayLike]) -> None:
        """Replaces its weights.

        Args:
          weights: arrays in the order and with the shapes of `get_weights`.

        Raises:
          ValueError: if their number or a shape differs; nothing is replaced then.
          TypeError: if they are not a list.
        """
        self._write(self.weights, weights)

    def __repr__(self) -> str:
        return f"<ModelLayer path={self.path}, module={type(self.module).__name__}>"


def outermost(
    layers: Sequence[ModuleLayer], variables: Callable[[], list[tuple[str, ModelVariable]]], write: Write,
) -> list[ModelLayer]:
    """Returns those layers that are in no other of them, in their order; each with the layers in it.

    Args:
      layers: the layers, without the module that all are in.
      variables: see `ModelLayer`.
      write: see `ModelLayer`.
    """
    paths = {layer.path for layer in layers}
    return [ModelLayer(layer, [other for other in layers if other.path.startswith(f"{layer.path}{SEPARATOR}")],
                       variables, write)
            for layer in layers if not paths.intersection(_parents(layer.path))]


def find(layers: Sequence[ModelLayer], name: Any, index: Any) -> ModelLayer:
    """Returns the layer that `Model.get_layer` is asked for.

    Raises:
      ValueError: if there is no such layer, or not just one of `name` and `index` is given.
      TypeError: if either is of a wrong type.
    """
    if (name is None) == (index is None):
        raise ValueError("Provide either a layer name or a layer index at `get_layer`. "
                         f"Received: index={index}, name={name}.")
    if index is not None:
        try:
            return layers[operator.index(index)]
        except TypeError:
            raise errors.wrong_type("index", index, "a whole number") from None
        except IndexError:
            raise ValueError(f"Was asked to retrieve layer at index {index} but model only has {len(layers)} "
                             "layers.") from None
    if not isinstance(name, str):
        raise errors.wrong_type("name", name, "the name of a layer")
    every = list(layers)
    for layer in every:  # grows: layers in a layer are found by their paths
        if layer.name == name:
            return layer
        every += layer.layers
    raise ValueError(f"No such layer: {name!r}. {errors.near_hint(name, [layer.name for layer in every])}")


def _parents(path: str) -> list[str]:
    names = path.split(SEPARATOR)
    return [SEPARATOR.join(names[:end]) for end in range(1, len(names))]
