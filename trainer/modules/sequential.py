"""A list of layers and plain functions as one module.

Owns the calls one after another, and the stack of Linen layers; `nnx_sequential.py` has the one of NNX layers. Unlike
Flax's own `Sequential`, a stack tells each layer that has a flag for it whether it is being trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from trainer.core.types import PyTree
from trainer.modules.calling.call_arguments import MakeKey, call_arguments
from trainer.modules.calling.nnx_types import is_nnx_module
from trainer.modules.remat import call_function


def call_in_turn(layers: Sequence[Callable[..., Any]], inputs: PyTree, training: bool, make_key: MakeKey) -> Any:
    """Returns what the last layer returns, where each is called on what the layer before it returned.

    Args:
      layers: bound Linen layers or NNX layers, and plain functions between them.
      inputs: one batch.
      training: whether the call is part of training.
      make_key: gives a key for each name that a layer's signature asks for.
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
    """Returns a Linen module that applies `layers` one after another.

    Its parameters are named as in `nn.Sequential` ("layers_0"), or by a layer's own name, if any.
    """
    return _LinenStack(tuple(layers))


class _LinenStack(nn.Module):
    layers: tuple[Callable[..., Any], ...]

    # Read by Flax: a layer keeps the name it was given.
    preserve_adopted_names = True

    @nn.compact
    def __call__(self, inputs: PyTree, training: bool) -> Any:
        return call_in_turn(self.layers, inputs, training, self.make_rng)
