"""A list of layers and plain functions as one module.

Owns the two stacks, one of Linen and one of NNX layers. Unlike Flax's own `Sequential`, a stack tells each layer that
has a flag for it whether it is being trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn
from flax import nnx

from trainer.modules.base import call_arguments
from trainer.modules.remat import call_function


def stack_layers(layers: Sequence[Callable[..., Any]]) -> nn.Module | nnx.Module:
    """Returns a module that applies `layers` one after another.

    Args:
      layers: Linen or NNX layers, and plain functions between them. The same layer twice shares its parameters.

    Returns:
      For NNX layers an NNX module that holds them; else a Linen module, whose parameters are named as in
      `nn.Sequential` ("layers_0"), or by a layer's own name if it has one.

    Raises:
      ValueError: there are no layers.
      TypeError: an item can be no layer, or Linen and NNX layers are mixed.
    """
    if not layers:
        raise ValueError("A stack needs at least one layer. Received: an empty list.")
    for index, layer in enumerate(layers):
        if isinstance(layer, type):
            raise TypeError(f"Layer {index} must be an instance. Received: the class {layer.__name__}. "
                            f"Call it: {layer.__name__}(...).")
        if not callable(layer):
            raise TypeError(f"Layer {index} must be a Flax layer or a function. Received: a value of type "
                            f"{type(layer).__name__}.")
    has_nnx = any(isinstance(layer, nnx.Module) for layer in layers)
    if has_nnx and any(isinstance(layer, nn.Module) for layer in layers):
        raise TypeError("A stack must have either Linen or NNX layers. Received: both. Use layers of one kind.")
    return _NNXStack(layers) if has_nnx else _LinenStack(tuple(layers))


def _call_in_turn(layers: Sequence[Callable[..., Any]], inputs: Any, training: bool) -> Any:
    for index, layer in enumerate(layers):
        args, kwargs = call_arguments(layer, inputs, training)
        if isinstance(layer, (nn.Module, nnx.Module)):
            inputs = layer(*args, **kwargs)
        else:
            inputs = call_function(f"layers_{index}", layer, args, kwargs)
    return inputs


class _LinenStack(nn.Module):
    layers: tuple[Callable[..., Any], ...]

    # Read by Flax: a layer keeps the name it was given.
    preserve_adopted_names = True

    @nn.compact
    def __call__(self, inputs: Any, training: bool) -> Any:
        return _call_in_turn(self.layers, inputs, training)


class _NNXStack(nnx.Module):
    def __init__(self, layers: Sequence[Callable[..., Any]]):
        self.layers = nnx.List(layers)

    def __call__(self, inputs: Any, training: bool) -> Any:
        return _call_in_turn(list(self.layers), inputs, training)
