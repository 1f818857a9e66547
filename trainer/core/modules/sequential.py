"""A list of layers and plain functions as a single module.

Owns the sequence of calls and the stack of Linen layers; `nnx_sequential.py` owns the stack of NNX layers. Unlike
Flax's `Sequential`, a stack passes a training flag to each layer that has a parameter for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from flax import linen as nn

from trainer.core.modules.base import FunctionalModule
from trainer.core.modules.calling.call_arguments import MakeKey, call_arguments
from trainer.core.modules.calling.nnx_types import is_nnx_module
from trainer.core.modules.remat import call_function
from trainer.core.modules.summary import CallObserver, ModuleLayer
from trainer.core.types import PyTree


def call_in_turn(layers: Sequence[Callable[..., Any]], inputs: PyTree, training: bool, make_key: MakeKey) -> Any:
    """Returns the output of the last layer. Each layer is called on the output of the layer before it.

    Args:
      layers: bound Linen layers or NNX layers, and plain functions between them.
      inputs: one batch.
      training: whether the call is part of training.
      make_key: returns a key for each name that a layer's signature asks for.
    """
    for index, layer in enumerate(layers):
        args, kwargs = call_arguments(layer, inputs, training, functools.partial(_key, make_key, index))
        if isinstance(layer, nn.Module) or is_nnx_module(layer):
            inputs = layer(*args, **kwargs)
        else:
            inputs = call_function(f"layers_{index}", layer, args, kwargs)
    return inputs


def _key(make_key: MakeKey, index: int, name: str) -> jax.Array:
    return make_key(f"layers_{index}/{name}")


def linen_stack(layers: Sequence[Callable[..., Any]]) -> nn.Module:
    """Returns a Linen module that applies `layers` in sequence.

    Its parameters have the names of `nn.Sequential` ("layers_0"), or a layer's own name, if any.
    """
    return LinenStack(tuple(layers))


class LinenStack(nn.Module):
    """The module returned by `linen_stack`."""

    layers: tuple[Callable[..., Any], ...]

    # Read by Flax: a layer keeps its own name.
    preserve_adopted_names = True

    @nn.compact
    def __call__(self, inputs: PyTree, training: bool) -> Any:
        return call_in_turn(self.layers, inputs, training, self.make_rng)

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return [(isinstance(layer, nn.Module) and layer.name) or f"layers_{index}"
                for index, layer in enumerate(self.layers)]


class EmptyStack(FunctionalModule):
    """A stack without layers. Only its list of layers can be used."""

    name = "sequential"

    def init(self, key: jax.Array, inputs: PyTree, initial_values: PyTree = None) -> NoReturn:
        """Raises ValueError."""
        raise ValueError("The model has no layers. Call `add(layer)`, or give them to `Sequential([...])`.")

    def apply(self, params: dict, model_state: dict, inputs: PyTree, **options: Any) -> NoReturn:
        """Raises ValueError."""
        self.init(jax.random.key(0), inputs)

    def observe_calls(self, inputs: PyTree, observer: CallObserver) -> tuple[dict, list[dict]]:
        return {}, []

    def find_layers(self, inputs: PyTree) -> list[ModuleLayer]:
        return []

    def absorb(self, params: dict, model_state: dict) -> None:
        """Does nothing: there are no values."""
