"""Stacks of batches on the devices, and how one is gathered from arrays that are there.

A step takes stacks alone. So the rows of a host, a pipeline and arrays on the devices all run in one program. Where
arrays live is not known here.
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
      numbers: int32 of shape `(batches, rows)`, each below `length`.
      exchange: a hashable function `(arrays, numbers)` that returns a batch's rows, in a compiled function, where no
        device has all of them; None where the compiler is to find them.
    """

    arrays: Any
    numbers: jax.Array
    exchange: Callable[[Any, jax.Array], Any] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def are_whole(self) -> bool:
        """Whether each device has all rows, so that none is sent to another."""
        return all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(self.arrays))


def gathered(batches: ResidentBatches, start: jax.Array, length: int) -> Any:
    """Returns a stack of `length` batches from the number `start` on, in a compiled function.

    Beyond the last batch, the last is repeated: a stack has one shape, and the step leaves out what is not there.
    """
    numbers = batches.numbers[jnp.minimum(start + jnp.arange(length), len(batches.numbers) - 1)]
    if batches.exchange is None:
        return take_rows(batches.arrays, numbers)
    exchange = batches.exchange
    return lax.map(lambda rows: exchange(batches.arrays, rows), numbers)


def batch_at(stack: PyTree, index: ArrayLike) -> Any:
    """Returns one batch of a stack, in a compiled function.

    Args:
      stack: a tree of arrays of shape `(batches, rows, ...)`.
      index: the batch's number, a scalar that may be traced.

    Returns:
      A tree of arrays of shape `(rows, ...)`.
    """
    batch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), stack)
    return lax.optimization_barrier(batch)  # the rounding of what follows must not depend on the stack


def take_rows(arrays: PyTree, numbers: jax.Array) -> Any:
    """Returns the rows with some numbers, all of which exist, of each of a tree of arrays."""
    return jax.tree.map(lambda leaf: leaf.at[numbers].get(mode="promise_in_bounds"), arrays)


def stack_length(stack: PyTree) -> int:
    """Returns how many batches a stack has capacity for."""
    return jax.tree.leaves(stack)[0].shape[0]
