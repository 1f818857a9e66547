"""A list of NNX layers and plain functions as a single module.

Owns the stack of layers; `sequential.py` owns their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from trainer.core.modules.calling.call_arguments import MakeKey
from trainer.core.modules.sequential import call_in_turn
from trainer.core.types import PyTree


def nnx_stack(layers: Sequence[Callable[..., Any]]) -> nnx.Module:
    """Returns an NNX module that holds `layers` and applies them in sequence."""
    return NNXStack(layers)


class NNXStack(nnx.Module):
    """The module returned by `nnx_stack`."""

    def __init__(self, layers: Sequence[Callable[..., Any]]):
        self.layers = nnx.List(layers)

    def __call__(self, inputs: PyTree, training: bool, make_key: MakeKey) -> Any:
        return call_in_turn(list(self.layers), inputs, training, make_key)
