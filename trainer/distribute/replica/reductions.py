"""Common part of all-reduce algorithms: conversion of trees to vectors, of sums to means, and hints.

Names no collective: the algorithms are in `collectives.py`.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp

from trainer.core.arguments import check_count
from trainer.core.replica_context import ReduceOp
from trainer.core.types import ArrayLike, PyTree
from trainer.distribute.replica.bucketing import BYTES_PER_PACK, over_packs_elementwise
from trainer.distribute.replica.communication_options import (
    CommunicationImplementation,
    CommunicationOptions,
    checked_options,
)

AxisName = str | tuple[str, ...]
"""Name of the mesh axis of the replicas; or names of several, which count replicas like the digits of a number."""

_IMPLEMENTATIONS: dict[CommunicationImplementation, type[CrossDeviceOps]] = {}


class CrossDeviceOps(abc.ABC):
    """Sums of values over replicas: the base class of all algorithms.

    With every algorithm, all replicas get the same bits, and the derivative of a sum over replicas is a sum over
    replicas. The order of additions differs, so another algorithm may round differently. Additions use the arrays'
    dtype, or the wider dtype that the backend chooses for it.

    All but `NcclAllReduce` join arrays to vectors, for which arrays that are split over another mesh axis are gathered.

    A custom subclass overrides `sum_over_replicas`.

    Args:
      num_packs: approximate number of packs per tree; an array is never divided. 1 lets the size of the tree and the
        backend decide; 0 reduces each array separately if the algorithm can.
      options: hints for every reduction.

    Raises:
      ValueError: if `num_packs` is negative.
      TypeError: if an argument has the wrong type.

    Source: `tf.distribute.CrossDeviceOps`.
    """

    # Whether an algorithm accepts only vectors, and therefore joins small arrays on every backend.
    takes_vectors_only = True

    def __init_subclass__(cls, implementation: CommunicationImplementation | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if implementation is not None:
            _IMPLEMENTATIONS[implementation] = cls

    def __init__(self, num_packs: int = 1, *, options: CommunicationOptions | None = None):
        check_count("num_packs", num_packs, 0)
        self.num_packs = num_packs
        self.options = checked_options(options) or CommunicationOptions()

    @abc.abstractmethod
    def sum_over_replicas(self, vector: jax.Array, axis_name: AxisName, num_replicas: int) -> jax.Array:
        """Returns the sum over replicas of a vector that is not empty.

        Args:
          vector: this replica's vector, of shape `(size,)`.
          axis_name: the mesh axis of the replicas.
          num_replicas: the size of this axis, at least 2.
        """

    def check_replicas(self, num_replicas: int) -> None:
        """Raises ValueError if the algorithm does not support this number of replicas."""
        check_count("num_replicas", num_replicas, 1)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        tree: PyTree,
        axis_name: AxisName,
        num_replicas: int,
        packs: bool = True,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Returns the sum or the mean over replicas of a tree of arrays; with a single replica, the tree as it is.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          tree: arrays of the same shapes on all replicas, of numbers or booleans, which count as 0 and 1. The mean of
            integers is floating-point.
          axis_name: the mesh axis of the replicas.
          num_replicas: the size of this axis.
          packs: whether the backend gains from packing arrays. Packing gathers arrays that are split over another mesh
            axis.
          options: hints for this reduction, instead of the algorithm's own. If packing does not help the backend, the
            algorithm's own `bytes_per_pack` is left to the compiler, which combines arrays without copying them.

        Raises:
          ValueError: if the algorithm does not support this number of replicas.
          TypeError: if `options` are not CommunicationOptions.
        """
        op, is_own = ReduceOp.of(reduce_op), checked_options(options) is None
        options = options or self.options
        if num_replicas == 1:
            return tree
        ops = self._implementing(options.implementation)
        ops.check_replicas(num_replicas)
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [as_summable(leaf) for leaf in leaves]
        asked = 0 if is_own and not packs and not ops.takes_vectors_only else options.bytes_per_pack
        limit = ops._bytes_per_pack(sum(array.nbytes for array in arrays), packs, asked)
        collective = functools.partial(ops.sum_over_replicas, axis_name=axis_name, num_replicas=num_replicas)
        sums = over_packs_elementwise(collective, arrays, limit)
        return jax.tree.unflatten(treedef, [sum_or_mean(op, total, num_replicas) for total in sums])

    def _implementing(self, implementation: CommunicationImplementation) -> CrossDeviceOps:
        if implementation is CommunicationImplementation.AUTO:
            return self
        wanted = _IMPLEMENTATIONS[implementation]
        return self if isinstance(self, wanted) else wanted(self.num_packs)

    def _bytes_per_pack(self, tree_bytes: int, packs: bool, asked: int) -> int | None:
        """Returns the maximum size of packs; None if arrays are better not packed."""
        if self.num_packs == 0:
            return 0 if self.takes_vectors_only else None
        if not (packs or self.takes_vectors_only or self.num_packs > 1 or asked):
            return None
        limit = asked or BYTES_PER_PACK
        return min(limit, -(-tree_bytes // self.num_packs)) if self.num_packs > 1 else limit


def as_summable(leaf: ArrayLike) -> jax.Array:
    """Returns an array of numbers; booleans become 0 and 1."""
    array = jnp.asarray(leaf)
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def sum_or_mean(op: ReduceOp, total: jax.Array, num_replicas: int) -> jax.Array:
    """Returns the sum or the mean from a sum over replicas."""
    return total / num_replicas if op is ReduceOp.MEAN else total
