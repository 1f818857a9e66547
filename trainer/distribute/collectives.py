"""The collectives between replicas. The only file that names them.

Trees are packed into few flat vectors first where the backend does not combine collectives itself: on CPU each
collective is a rendezvous of all replicas (20 leaves over 8 devices took 5.6 ms one by one, 0.29 ms packed).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trainer.replica import ReduceOp, ReplicaContext

BYTES_PER_PACK = 32 * 2**20


def _over_packs(reduce: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies an elementwise collective to a tree, on vectors of at most `BYTES_PER_PACK` (or one leaf, if larger)."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for index, leaf in enumerate(leaves):
        pack, size = open_packs.get(leaf.dtype, ([], BYTES_PER_PACK))
        if not pack or size + leaf.nbytes > BYTES_PER_PACK:
            pack, size = [], 0
            packs.append(pack)
        pack.append(index)
        open_packs[leaf.dtype] = (pack, size + leaf.nbytes)
    reduced: list[Any] = [None] * len(leaves)
    for pack in packs:
        if len(pack) == 1:
            reduced[pack[0]] = reduce(leaves[pack[0]])
            continue
        vector = reduce(jnp.concatenate([leaves[index].ravel() for index in pack]))
        start = 0
        for index in pack:
            stop = start + leaves[index].size
            reduced[index] = vector[start:stop].reshape(leaves[index].shape)
            start = stop
    return jax.tree.unflatten(treedef, reduced)


class MeshReplicaContext(ReplicaContext):
    """The context of one replica inside `shard_map` over a mesh axis.

    Args:
      axis_name: the mesh's axis of replicas.
      num_replicas: the size of that axis.
      packs: whether trees are packed before a collective.
      rows: this replica's rows of the batch, padding included.
      row_mask: float32 of shape `(rows,)`, 0.0 for padding; None for a batch without any.
    """

    def __init__(self, axis_name: str, num_replicas: int, packs: bool, rows: int | None, row_mask: jax.Array | None):
        super().__init__(rows, row_mask)
        self.axis_name = axis_name
        self.num_replicas_in_sync = num_replicas
        self._over_tree = _over_packs if packs else jax.tree.map

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        return lax.axis_index(self.axis_name)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        collective = lax.psum if ReduceOp.of(reduce_op) is ReduceOp.SUM else lax.pmean
        if self.num_replicas_in_sync == 1:
            return value
        return self._over_tree(functools.partial(collective, axis_name=self.axis_name), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis_name, axis=axis, tiled=True), value)
