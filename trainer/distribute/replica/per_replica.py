"""Values that differ between replicas, and their combination.

Owns the rule that padding is invisible: a value with rows carries the mask of its real rows, and every result of a
`PerReplica` omits the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core.replica_context import ReduceOp
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import is_split_over_processes, to_host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerReplica:
    """One array per replica, all of the same shape.

    Attributes:
      stacked: shape `(replicas, ...)`, entry i on the device of replica i.
      row_mask: float32 of shape `(replicas, rows)`, 0.0 for padding rows; None without padding or without rows.
    """

    stacked: jax.Array
    row_mask: jax.Array | None = None

    def _is_no_number(self, other: object = None) -> NoReturn:
        raise TypeError("A PerReplica has a value of each replica, and is no number or array itself. Combine them by "
                        '`strategy.reduce("mean", value)` or "sum", or take them one by one from `value.values`.')

    __float__ = __int__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _is_no_number

    @property
    def values(self) -> tuple[np.ndarray, ...]:
        """Arrays of all replicas on the host, without padding rows. With several processes, all must access it."""
        return _real_rows(to_host(self.stacked), None if self.row_mask is None else to_host(self.row_mask))

    @property
    def local_values(self) -> tuple[np.ndarray, ...]:
        """Arrays of this process's replicas on the host, without padding rows."""
        return _real_rows(_here(self.stacked), None if self.row_mask is None else _here(self.row_mask))

    def reduced(self, op: ReduceOp, axis: int | None) -> jax.Array:
        """Returns the sum or mean over the replicas and, if `axis` is given, also over this axis of each array.

        Along axis 0 of a value with rows, each real row counts once.
        """
        if axis is None:
            return self.stacked.sum(0) if op is ReduceOp.SUM else self.stacked.mean(0)
        dimensions = self.stacked.ndim - 1
        if not -dimensions <= axis < dimensions:
            raise ValueError(f"`axis` is {axis}, but each replica's value has {dimensions} axes. "
                             "Values without axes are reduced with `axis=None`.")
        axes = (0, 1 + axis % dimensions)
        if self.row_mask is None or axes[1] != 1:
            return self.stacked.sum(axes) if op is ReduceOp.SUM else self.stacked.mean(axes)
        mask = self.row_mask.reshape(self.row_mask.shape + (1,) * (dimensions - 1))
        # Not a product: results of padding rows may be infinite.
        total = jnp.where(mask > 0, self.stacked, 0).sum(axes)
        return total if op is ReduceOp.SUM else total / self.row_mask.sum()


class ValueContext(NamedTuple):
    """Input of a function that makes the value of a replica, as in `tf.distribute`.

    Attributes:
      replica_id_in_sync_group: the index of the replica.
      num_replicas_in_sync: number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def _real_rows(stacked: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, ...]:
    if mask is None:
        return tuple(stacked)
    return tuple(one[rows > 0] for one, rows in zip(stacked, mask, strict=True))


def _here(stacked: jax.Array) -> np.ndarray:
    if not is_split_over_processes(stacked):
        return np.asarray(stacked)
    parts = {shard.index[0].start: shard.data for shard in stacked.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def is_per_replica(value: object) -> bool:
    """Returns whether `value` is a PerReplica."""
    return isinstance(value, PerReplica)


def map_values(function: Callable[..., Any], tree: PyTree) -> Any:
    """Returns a tree with `function` applied to each leaf; a PerReplica is a leaf."""
    return jax.tree.map(function, tree, is_leaf=is_per_replica)


def rows_of(values: Mapping[int, PerReplica]) -> tuple[int | None, jax.Array | None]:
    """Returns a replica's number of rows and their mask, from the first of its values that has rows."""
    for value in values.values():
        if value.row_mask is not None:
            return value.row_mask.shape[0], value.row_mask
    return next((value.stacked.shape[0] for value in values.values() if value.stacked.ndim), None), None
