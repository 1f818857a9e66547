"""Stacks of batches on the devices, gathered from arrays there.

A step takes stacks only, so host rows, pipelines and arrays on the devices share a program. The placement of arrays is
not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trainer.core.types import ArrayLike, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidentBatches:
    """Batches of rows of arrays on the devices.

    Attributes:
      arrays: a tree of arrays of shape `(length, ...)`.
      numbers: row indices, int32 of shape `(batches, rows)`, each below `length`.
      exchange: a hashable function `(arrays, numbers)` that returns the rows of a batch in a compiled function, if no
        device has all rows; None if the compiler gathers them.
    """

    arrays: Any
    numbers: jax.Array
    exchange: Callable[[Any, jax.Array], Any] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def are_whole(self) -> bool:
        """Whether each device has all rows, so that no row is sent to another."""
        return all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(self.arrays))


def gathered(batches: ResidentBatches, start: jax.Array, length: int) -> Any:
    """Returns a stack of `length` batches from the index `start` on, in a compiled function.

    The last batch is repeated to fill the stack, which keeps a single shape; the step ignores the repetitions.
    """
    numbers = batches.numbers[jnp.minimum(start + jnp.arange(length), len(batches.numbers) - 1)]
    if batches.exchange is None:
        return take_rows(batches.arrays, numbers)
    exchange = batches.exchange
    return lax.map(lambda rows: exchange(batches.arrays, rows), numbers)


def batch_at(stack: PyTree, index: ArrayLike) -> Any:
    """Returns a batch of a stack, in a compiled function.

    Args:
      stack: a tree of arrays of shape `(batches, rows, ...)`.
      index: the index of the batch, a scalar that may be traced.

    Returns:
      A tree of arrays of shape `(rows, ...)`.
    """
    batch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), stack)
    return lax.optimization_barrier(batch)  # later rounding must not depend on the stack


def take_rows(arrays: PyTree, numbers: jax.Array) -> Any:
    """Returns the rows at given indices, which must all exist, of each array in a tree."""
    return jax.tree.map(lambda leaf: leaf.at[numbers].get(mode="promise_in_bounds"), arrays)


def stack_length(stack: PyTree) -> int:
    """Returns the capacity of a stack in batches."""
    return jax.tree.leaves(stack)[0].shape[0]
