"""A layer of a model, with its name and weights.

Owns which weights belong to a layer, and which layer a name or a number refers to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from trainer.core import errors
from trainer.core.foreign_names import ForeignNames
from trainer.core.modules.summary import ModuleLayer
from trainer.core.tree_paths import SEPARATOR
from trainer.core.types import ArrayLike
from trainer.engine.model.views.variables import ModelVariable

_VALUES = ("The values of a layer are in the call of its module: return them too, or keep them by "
           "`self.sow(\"intermediates\", \"hidden\", h)`, which `outputs, values = model.apply(model.state.params, "
           "model.state, x)` returns.")
_SHAPES = "`model.summary()` shows the shapes of outputs."

Write = Callable[[Sequence[ModelVariable], Sequence[ArrayLike]], None]


class ModelLayer(ForeignNames):
    """A layer of a model: a submodule of its module, or a function of a stack.

    Args:
      layer: its path and its module.
      inside: all layers inside it, at any depth.
      variables: returns the weights of the model with the paths of their layers.
      write: replaces some weights at once.

    Attributes:
      path: the path of the layer, such as "encoder/Dense_0", as in patterns of `freeze`.
      module: the Flax module or the function. A Linen module has no weights, and is a new instance with the same
        arguments. An NNX module is the user's own, with the arrays from the end of the last `fit`.

    Example:
      >>> model.get_layer("Dense_0").set_weights([bias, kernel])  # doctest: +SKIP
    """

    _foreign_names = {"output": _VALUES, "input": _VALUES, "output_shape": _SHAPES, "input_shape": _SHAPES}
    __slots__ = ("_inside", "_variables", "_write", "module", "path")

    def __init__(self, layer: ModuleLayer, inside: Sequence[ModuleLayer],
                 variables: Callable[[], list[tuple[str, ModelVariable]]], write: Write):
        self.path, self.module = layer
        self._inside, self._variables, self._write = inside, variables, write

    @property
    def name(self) -> str:
        """The path, for `get_layer`; the name of the class if the model's module is a single layer."""
        return self.path or type(self.module).__name__

    @property
    def layers(self) -> list[ModelLayer]:
        """The direct sublayers of this layer."""
        return outermost(self._inside, self._variables, self._write)

    @property
    def weights(self) -> list[ModelVariable]:
        """The weights of the layer and its sublayers: the parameters, then the state, each sorted by path."""
        below = self.path and f"{self.path}{SEPARATOR}"
        return [variable for path, variable in self._variables() if path.startswith(below)]

    variables = weights

    @property
    def trainable_weights(self) -> list[ModelVariable]:
        """The trained weights of the layer."""
        return [weight for weight in self.weights if weight.trainable]

    trainable_variables = trainable_weights

    @property
    def non_trainable_weights(self) -> list[ModelVariable]:
        """The frozen weights of the layer, and its state, such as running averages."""
        return [weight for weight in self.weights if not weight.trainable]

    non_trainable_variables = non_trainable_weights

    @property
    def trainable(self) -> bool:
        """Whether any weight of the layer is trained. To change it, use `compile(freeze=[layer.path])`."""
        return bool(self.trainable_weights)

    @trainable.setter
    def trainable(self, value: object) -> NoReturn:
        raise AttributeError(f"`trainable` of the layer {self.path!r} cannot be set: `compile` says what is trained. "
                             f"Call `compile(..., freeze=[{self.path!r}])` for layers that are to stay as they are, "
                             "without it to train all.")

    def count_params(self) -> int:
        """Returns the number of scalar weights."""
        return sum(weight.size for weight in self.weights)

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of the weights, in the order of `weights`."""
        return [weight.numpy() for weight in self.weights]

    def set_weights(self, weights: Sequence[ArrayLike]) -> None:
        """Replaces the weights.

        Args:
          weights: arrays in the order and with the shapes of `get_weights`.

        Raises:
          ValueError: if their number or a shape differs; nothing is replaced.
          TypeError: if they are not a list.
        """
        self._write(self.weights, weights)

    def __repr__(self) -> str:
        return f"<ModelLayer path={self.path}, module={type(self.module).__name__}>"


def outermost(
    layers: Sequence[ModuleLayer], variables: Callable[[], list[tuple[str, ModelVariable]]], write: Write,
) -> list[ModelLayer]:
    """Returns the layers that are in no other of the layers, in their order, each with the layers inside it.

    Args:
      layers: the layers, without the root module.
      variables, write: see `ModelLayer`.
    """
    paths = {layer.path for layer in layers}
    return [ModelLayer(layer, [other for other in layers if other.path.startswith(f"{layer.path}{SEPARATOR}")],
                       variables, write)
            for layer in layers if not paths.intersection(_parents(layer.path))]


def find(layers: Sequence[ModelLayer], name: Any, index: Any) -> ModelLayer:
    """Returns the layer for the arguments of `Model.get_layer`.

    Raises:
      ValueError: if there is no such layer, or both or neither of `name` and `index` are given.
      TypeError: if either has a wrong type.
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
    for layer in every:  # grows by the sublayers of each layer
        if layer.name == name:
            return layer
        every += layer.layers
    raise ValueError(f"No such layer: {name!r}. {errors.near_hint(name, [layer.name for layer in every])}")


def _parents(path: str) -> list[str]:
    names = path.split(SEPARATOR)
    return [SEPARATOR.join(names[:end]) for end in range(1, len(names))]
