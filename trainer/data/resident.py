"""Batches that are already on the devices, as numbers of rows of arrays there.

Owns what a compiled step does with stacked batches, whichever way they are given. It must not know where arrays live.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidentBatches:
    """Stacked batches whose rows are gathered on the devices.

    Attributes:
      arrays: a tree of arrays of shape `(length, ...)`.
      numbers: int32 of shape `(batches, rows)`, each below `length`.
      exchange: a hashable function `(arrays, numbers)` that returns a batch's rows, in a compiled function, where no
        device has all of them; None where the compiler is to find them.
    """

    arrays: Any
    numbers: jax.Array
    exchange: Callable[[Any, jax.Array], Any] | None = dataclasses.field(default=None, metadata={"static": True})


def batch_at(stack: Any, index: Any) -> Any:
    """Returns one batch of a stack, in a compiled function.

    Args:
      stack: a `ResidentBatches`, or a tree of arrays of shape `(batches, rows, ...)`.
      index: the batch's number, a scalar that may be traced.

    Returns:
      A tree of arrays of shape `(rows, ...)`.
    """
    if not isinstance(stack, ResidentBatches):
        batch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), stack)
    else:
        rows = lax.dynamic_index_in_dim(stack.numbers, index, 0, keepdims=False)
        batch = take_rows(stack.arrays, rows) if stack.exchange is None else stack.exchange(stack.arrays, rows)
    # Apart from what follows, which is then compiled as it is for the other kind of stack.
    return lax.optimization_barrier(batch)


def take_rows(arrays: Any, numbers: jax.Array) -> Any:
    """Returns the rows with some numbers, all of which exist, of each of a tree of arrays."""
    return jax.tree.map(lambda leaf: leaf.at[numbers].get(mode="promise_in_bounds"), arrays)


def stack_length(stack: Any) -> int:
    """Returns how many batches a stack has capacity for."""
    return (stack.numbers if isinstance(stack, ResidentBatches) else jax.tree.leaves(stack)[0]).shape[0]
