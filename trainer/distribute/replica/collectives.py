"""Collectives between replicas. The only file that names them.

Owns the all-reduce algorithms, the gathering and reduction of state that is split over replicas, and the context of a
replica inside `shard_map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trainer.core import errors
from trainer.core.arguments import check_count
from trainer.core.foreign_names import ForeignNames
from trainer.core.replica_context import ReduceOp, ReplicaContext
from trainer.core.types import PyTree
from trainer.data.resident import take_rows
from trainer.distribute.replica.bucketing import (
    BYTES_PER_PACK,
    over_packs,
    over_packs_elementwise,
    padded_to_multiple,
    split_in_front,
)
from trainer.distribute.replica.communication_options import (
    CommunicationImplementation,
    CommunicationOptions,
)
from trainer.distribute.replica.reductions import AxisName, CrossDeviceOps, as_summable, sum_or_mean
from trainer.distribute.replica.tensorflow_names import missing

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "MeshReplicaContext",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "exchange_rows",
    "gather_shards",
    "reduce_to_shards",
    "take_shards",
]


class NcclAllReduce(CrossDeviceOps, implementation=CommunicationImplementation.NCCL):
    """The all-reduce of the backend, by NCCL on NVIDIA GPUs and by XLA elsewhere. The default.

    Args:
      num_packs: approximate number of packs per tree. 1 lets the size of the tree and the backend decide; 0 reduces
        each array separately. The compiler may join packs again.
      options: hints for every reduction.

    Example:
      >>> reduce = lambda x: NcclAllReduce().all_reduce("mean", x, "replica", num_replicas=4)
      >>> jax.vmap(reduce, axis_name="replica")(jnp.arange(4.0)).tolist()
      [1.5, 1.5, 1.5, 1.5]

    Source: `tf.distribute.NcclAllReduce`.
    """

    takes_vectors_only = False

    def sum_over_replicas(self, vector: jax.Array, axis_name: AxisName, num_replicas: int) -> jax.Array:
        return _sum(vector, axis_name)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """A reduction within groups, then between them, for groups with better connections inside.

    Each group reduces and scatters, so that each of its S replicas holds a part of the group's sum. The replicas that
    hold the same part sum it over the groups. Each group then gathers. Only 1/S of a vector passes between groups.

    Args:
      num_packs: as in `CrossDeviceOps`.
      group_size: number of adjacent replicas in a group. By default the divisor of the number of replicas nearest to
        its square root, the larger of two. A prime number of replicas forms a single group, without a second level.
      options: hints for every reduction.

    Raises:
      ValueError: if `group_size` is less than 1 or, once the number of replicas is known, does not divide it.
      TypeError: if an argument has the wrong type.

    Example:
      >>> HierarchicalCopyAllReduce().groups(num_replicas=8)
      [[0, 1, 2, 3], [4, 5, 6, 7]]

    Source: `tf.distribute.HierarchicalCopyAllReduce`, with the scheme of Jia et al., "Highly Scalable Deep Learning
    Training System with Mixed-Precision", 2018.
    """

    def __init__(
        self, num_packs: int = 1, *, group_size: int | None = None, options: CommunicationOptions | None = None
    ):
        super().__init__(num_packs, options=options)
        if group_size is not None:
            check_count("group_size", group_size, 1)
        self.group_size = group_size

    def groups(self, num_replicas: int) -> list[list[int]]:
        """Returns the replicas of each group."""
        self.check_replicas(num_replicas)
        divisors = [size for size in range(2, num_replicas) if num_replicas % size == 0]
        # Distance from the square root as a factor: 2 and 4 are equally far from the square root of 8.
        nearest = min(divisors, key=lambda size: (max(size * size / num_replicas, num_replicas / size / size), -size),
                      default=num_replicas)
        size = self.group_size or nearest
        return [list(range(first, first + size)) for first in range(0, num_replicas, size)]

    def check_replicas(self, num_replicas: int) -> None:
        super().check_replicas(num_replicas)
        if self.group_size is not None and num_replicas % self.group_size:
            raise ValueError(f"`group_size` {self.group_size} does not divide the {num_replicas} replicas. Give a "
                             "divisor, or None.")

    def sum_over_replicas(self, vector: jax.Array, axis_name: AxisName, num_replicas: int) -> jax.Array:
        inside = self.groups(num_replicas)
        across = [list(replicas) for replicas in zip(*inside, strict=True)]
        part = padded_to_multiple(vector, len(across))
        if len(across) > 1:
            part = lax.psum_scatter(part, axis_name, axis_index_groups=inside, tiled=True)
        if len(inside) > 1:
            part = lax.psum(part, axis_name, axis_index_groups=across)
        if len(across) > 1:
            part = lax.all_gather(part, axis_name, axis_index_groups=inside, tiled=True)
        return part[:vector.size]


class ReductionToOneDevice(CrossDeviceOps):
    """A reduction to one replica and a broadcast from it, along a binary tree.

    With N replicas the reduction takes log2(N) rounds, rounded up, and so does the broadcast. In each round, at most
    half of the replicas send a whole vector.

    Args:
      reduce_to_device: the index of the replica that holds the result first; 0 by default.
      accumulation_fn: returns the sum of a list of two arrays, or a replacement for it: an associative function of
        their entries. Its derivative is the derivative of its operations.
      num_packs: as in `CrossDeviceOps`.
      options: hints for every reduction.

    Raises:
      ValueError: if `reduce_to_device` is negative or, once the number of replicas is known, not a replica.
      TypeError: if an argument has the wrong type.

    Example:
      >>> ReductionToOneDevice(reduce_to_device=2).check_replicas(num_replicas=2)
      Traceback (most recent call last):
      ValueError: `reduce_to_device` is 2, but there are 2 replicas, numbered from 0.

    Source: `tf.distribute.ReductionToOneDevice`, with the binomial trees of Thakur, Rabenseifner and Gropp,
    "Optimization of Collective Communication Operations in MPICH", 2005.
    """

    def __init__(
        self,
        reduce_to_device: int | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
        *,
        num_packs: int = 1,
        options: CommunicationOptions | None = None,
    ):
        super().__init__(num_packs, options=options)
        if isinstance(reduce_to_device, str):
            raise TypeError("`reduce_to_device` must be the number of a replica: the index of its device in the "
                            f"strategy's `devices`. Received: the name {reduce_to_device!r}.")
        if reduce_to_device is not None:
            check_count("reduce_to_device", reduce_to_device, 0)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise errors.wrong_type("accumulation_fn", accumulation_fn, "a function of a list of arrays, or None")
        self.reduce_to_device = reduce_to_device or 0
        self.accumulation_fn = accumulation_fn or sum

    def check_replicas(self, num_replicas: int) -> None:
        super().check_replicas(num_replicas)
        if self.reduce_to_device >= num_replicas:
            raise ValueError(f"`reduce_to_device` is {self.reduce_to_device}, but there are {num_replicas} replicas, "
                             "numbered from 0.")

    def sum_over_replicas(self, vector: jax.Array, axis_name: AxisName, num_replicas: int) -> jax.Array:
        def copied(distance: int, senders: range) -> jax.Array:
            pairs = [(sender, sender + distance) for sender in senders if 0 <= sender + distance < num_replicas]
            return lax.ppermute(vector, axis_name, [(replica(sender), replica(to)) for sender, to in pairs])

        def replica(rank: int) -> int:  # ranks count from the root
            return (rank + self.reduce_to_device) % num_replicas

        rank = (lax.axis_index(axis_name) - self.reduce_to_device) % num_replicas
        distances = [2**power for power in range((num_replicas - 1).bit_length())]
        for distance in distances:
            received = copied(-distance, range(distance, num_replicas, 2 * distance))
            receives = (rank % (2 * distance) == 0) & (rank + distance < num_replicas)
            vector = jnp.where(receives, self.accumulation_fn([vector, received]), vector)
        for distance in reversed(distances):
            received = copied(distance, range(0, num_replicas, 2 * distance))
            vector = jnp.where(rank % (2 * distance) == distance, received, vector)
        return vector


class RingAllReduce(CrossDeviceOps, implementation=CommunicationImplementation.RING):
    """Copies from each replica to the next in a ring, which minimizes the bytes that each replica sends.

    A vector of B bytes is cut into N parts. In N-1 rounds each part goes around the ring and collects its sum, and in
    N-1 more rounds the sums go around. Each replica sends 2 (N-1)/N B bytes. The rounds are loops, so the program has
    as many operations for four replicas as for a thousand.

    Args:
      num_packs: as in `CrossDeviceOps`.
      options: hints for every reduction.

    Example:
      >>> reduce = lambda x: RingAllReduce().all_reduce("sum", x, "replica", num_replicas=4)
      >>> jax.vmap(reduce, axis_name="replica")(jnp.arange(4)).tolist()
      [6, 6, 6, 6]

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """

    def sum_over_replicas(self, vector: jax.Array, axis_name: AxisName, num_replicas: int) -> jax.Array:
        own = padded_to_multiple(vector, num_replicas).reshape(num_replicas, -1)
        rank = lax.axis_index(axis_name)
        pass_on = functools.partial(
            lax.ppermute, axis_name=axis_name,
            perm=[(replica, (replica + 1) % num_replicas) for replica in range(num_replicas)])

        def part(of: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(own, of % num_replicas, keepdims=False)

        def gather(round_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            sums, passing = carry
            passing = pass_on(passing)
            return lax.dynamic_update_index_in_dim(sums, passing, (rank - round_) % num_replicas, 0), passing

        # Part p starts at replica p + 1, so that its sum is complete at replica p.
        total = lax.fori_loop(
            1, num_replicas, lambda round_, partial: pass_on(partial) + part(rank - round_ - 1), part(rank - 1))
        sums = lax.dynamic_update_index_in_dim(jnp.zeros_like(own), total, rank, 0)
        sums, _ = lax.fori_loop(1, num_replicas, gather, (sums, total))
        return sums.reshape(-1)[:vector.size]


def gather_shards(tree: PyTree, axes: Any, axis_name: str) -> Any:
    """Returns whole arrays, gathered from the shards of all replicas.

    The gradient of a shard is its share of the sum of all replicas' gradients.

    Args:
      tree: arrays; some are this replica's shard of a larger array.
      axes: the split axis of each array, a list or tree with as many leaves; -1 for an array that is already whole.
      axis_name: the mesh axis of the replicas.

    Raises:
      ValueError: if the numbers of axes and arrays differ.
    """
    leaves, treedef, along = _matched(tree, axes)
    for index, axis in enumerate(along):
        if axis >= 0 and leaves[index].size:
            leaves[index] = lax.all_gather(leaves[index], axis_name, axis=axis, tiled=True)
        elif axis >= 0:  # collectives do not accept empty arrays, which also have a size along their axis
            leaves[index] = jnp.concatenate([leaves[index]] * lax.axis_size(axis_name), axis)
    return jax.tree.unflatten(treedef, leaves)


def take_shards(tree: PyTree, axes: Any, axis_name: str, num_replicas: int) -> Any:
    """Returns this replica's shard of whole arrays.

    Args:
      tree: whole arrays.
      axes: the split axis of each array, a list or tree with as many leaves; -1 for an array that stays whole.
      axis_name: the mesh axis of the replicas.
      num_replicas: the size of this axis. It must divide the sizes along `axes`.

    Raises:
      ValueError: if the numbers of axes and arrays differ, or `num_replicas` does not divide a size.
    """
    leaves, treedef, along = _matched(tree, axes, num_replicas)
    for index, axis in enumerate(along):
        if axis >= 0:
            size = leaves[index].shape[axis] // num_replicas
            leaves[index] = lax.dynamic_slice_in_dim(leaves[index], lax.axis_index(axis_name) * size, size, axis)
    return jax.tree.unflatten(treedef, leaves)


def reduce_to_shards(
    reduce_op: ReduceOp | str, tree: PyTree, axes: Any, axis_name: str, num_replicas: int, packs: bool,
    others: Sequence[str] = (),
) -> Any:
    """Returns this replica's shard of the sum or the mean over replicas of a tree of arrays.

    Shards are reduced over `axis_name` first, so that only 1/num_replicas of the bytes passes over the other axes.

    Args:
      reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
      tree: arrays of the same shapes on all replicas.
      axes: the split axis of each array, a list or tree with as many leaves; -1 for an array that stays whole.
      axis_name: the mesh axis of the replicas that have the shards.
      num_replicas: the size of this axis. It must divide the sizes along `axes`.
      packs: whether arrays are packed before they are reduced.
      others: further mesh axes of replicas, whose replicas have equal shards.

    Raises:
      ValueError: if the numbers of axes and arrays differ, or `num_replicas` does not divide a size.
    """
    op = ReduceOp.of(reduce_op)
    leaves, treedef, along = _matched(tree, axes, num_replicas)
    all_replicas = num_replicas * (lax.axis_size(tuple(others)) if others else 1)
    if all_replicas == 1:
        return tree
    arrays = [as_summable(leaf) for leaf in leaves]
    split = [index for index, axis in enumerate(along) if axis >= 0 and arrays[index].size]
    whole = [index for index, axis in enumerate(along) if axis < 0]
    sums = _sums([arrays[index] for index in whole], (*others, axis_name) if others else axis_name, packs)
    scatter = functools.partial(_scattered_sum, axis_name=axis_name, others=others)  # (replicas, ...) to (...)
    if packs:
        stacks = [split_in_front(arrays[index], along[index], num_replicas) for index in split]
        flat = over_packs(scatter, [stack.reshape(num_replicas, -1) for stack in stacks], BYTES_PER_PACK)
        parts = [part.reshape(stack.shape[1:]) for part, stack in zip(flat, stacks, strict=True)]
    else:
        parts = [scatter(arrays[index], scatter_dimension=along[index], tiled=True) for index in split]
    reduced = [array if array.size or axis < 0 else split_in_front(array, axis, num_replicas)[0]
               for array, axis in zip(arrays, along, strict=True)]
    for index, total in zip([*split, *whole], [*parts, *sums], strict=True):
        reduced[index] = total
    return jax.tree.unflatten(treedef, [sum_or_mean(op, total, all_replicas) for total in reduced])


class MeshReplicaContext(ReplicaContext, ForeignNames):
    """The context of a replica inside `shard_map` over a mesh axis.

    Args:
      axis_name: the mesh axis of the replicas, or several.
      num_replicas: the size of this axis, or their product.
      packs: whether trees are packed before a collective.
      rows: number of this replica's rows of the batch, including padding.
      row_mask: float32 of shape `(rows,)`, 0.0 for padding; None for a batch without padding.
      ops: the algorithm of `all_reduce`, also for gradients; `NcclAllReduce()` by default.
    """

    _foreign_names = missing("ReplicaContext")

    def __init__(
        self,
        axis_name: AxisName,
        num_replicas: int,
        packs: bool,
        rows: int | None,
        row_mask: jax.Array | None,
        ops: CrossDeviceOps | None = None,
    ):
        super().__init__(rows, row_mask)
        self.axis_name = axis_name
        self.num_replicas_in_sync = num_replicas
        self.packs = packs
        self.ops = ops or NcclAllReduce()

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        return lax.axis_index(self.axis_name)

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None = None) -> Any:
        return self.ops.all_reduce(
            reduce_op, value, self.axis_name, self.num_replicas_in_sync, self.packs, options)

    def sum(self, value: PyTree) -> Any:
        if self.num_replicas_in_sync == 1:
            return value
        leaves, treedef = jax.tree.flatten(value)
        sums = _sums([as_summable(leaf) for leaf in leaves], self.axis_name, self.packs)
        return jax.tree.unflatten(treedef, sums)

    def all_gather(self, value: PyTree, axis: int = 0) -> Any:
        if self.num_replicas_in_sync == 1:
            return value
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis_name, axis=axis, tiled=True), value)


def _sums(arrays: list[jax.Array], axis_name: AxisName, packs: bool) -> list[jax.Array]:
    return over_packs_elementwise(
        functools.partial(_sum, axis_name=axis_name), arrays, BYTES_PER_PACK if packs else None)


def _sum(array: jax.Array, axis_name: AxisName) -> jax.Array:
    return _in_float32_on_cpus(lambda array: lax.psum(array, axis_name), array)


def _scattered_sum(array: jax.Array, axis_name: str, others: Sequence[str], **options: Any) -> jax.Array:
    def summed(array: jax.Array) -> jax.Array:
        part = lax.psum_scatter(array, axis_name, **options)
        return lax.psum(part, tuple(others)) if others else part

    return _in_float32_on_cpus(summed, array)


def _in_float32_on_cpus(summed: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    if array.dtype != jnp.bfloat16:
        return summed(array)
    # XLA adds in float32 on CPUs anyway, but its own conversion ends the process on a mesh with another axis that it
    # partitions.
    return lax.platform_dependent(
        array, cpu=lambda array: summed(array.astype(jnp.float32)).astype(array.dtype), default=summed)


def _matched(tree: PyTree, axes: Any, num_replicas: int = 1) -> tuple[list[jax.Array], Any, list[int]]:
    leaves, treedef = jax.tree.flatten(tree)
    along = [int(axis) for axis in jax.tree.leaves(axes)]
    if len(along) != len(leaves):
        raise ValueError(f"`axes` must have an axis for each array. Received: {len(along)} axes for {len(leaves)} "
                         "arrays.")
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    for array, axis in zip(arrays, along, strict=True):
        if axis >= 0 and array.shape[axis] % num_replicas:
            raise ValueError(f"Axis {axis} of an {errors.describe(array)} does not divide by {num_replicas} replicas. "
                             "Keep that array whole, with axis -1.")
    return arrays, treedef, along


def exchange_rows(arrays: PyTree, numbers: jax.Array, axis_name: AxisName, num_replicas: int) -> Any:
    """Returns a replica's rows of arrays that are split by rows over the replicas.

    The batch of each replica goes once around the ring of replicas, and each replica fills in the rows that it has. A
    replica therefore holds the rows of two of its own batches at a time; a sum over all replicas would hold the rows of
    all batches. The rows are only copied, without arithmetic.

    Args:
      arrays: the replica's shard of the arrays, a tree of arrays `(length / num_replicas, ...)`.
      numbers: global indices of the rows that the replica needs, of shape `(rows,)`.
      axis_name: the mesh axis of the replicas.
      num_replicas: number of replicas.
    """
    length = jax.tree.leaves(arrays)[0].shape[0]
    first = lax.axis_index(axis_name) * length
    ring = [(replica, (replica + 1) % num_replicas) for replica in range(num_replicas)]

    def taken(numbers: jax.Array) -> Any:
        return take_rows(arrays, jnp.clip(numbers - first, 0, length - 1))

    def hop(_: Any, batch: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        numbers, rows = lax.ppermute(batch, axis_name, ring)
        is_here = (numbers >= first) & (numbers < first + length)
        return numbers, jax.tree.map(
            lambda mine, others: jnp.where(is_here.reshape(-1, *[1] * (mine.ndim - 1)), mine, others),
            taken(numbers), rows)

    return lax.fori_loop(0, num_replicas, hop, (numbers, taken(numbers)))[1]  # the last hop returns it to its replica
