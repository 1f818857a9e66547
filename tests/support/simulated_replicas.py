"""Runs a function as several replicas on simulated devices, below the layers that do so for users."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from trainer.core import replica_context


class SimulatedContext(replica_context.ReplicaContext):
    def __init__(self, number, **kwargs):
        super().__init__(**kwargs)
        self.num_replicas_in_sync = number

    @property
    def replica_id_in_sync_group(self):
        return jax.lax.axis_index("replica")

    def all_reduce(self, reduce_op, value, options=None):
        is_sum = replica_context.ReduceOp.of(reduce_op) is replica_context.ReduceOp.SUM
        reduce = jax.lax.psum if is_sum else jax.lax.pmean
        return reduce(value, "replica")


def run_replicas(step, number, replicated, batch, real_rows=None):
    """Returns `step(replicated, batch)`, run by `number` replicas with a share of the batch each.

    Args:
      step: returns `(of_rows, of_all)`: outputs per row, and values that are equal on all replicas.
      number: how many replicas.
      replicated: a tree that each replica sees whole.
      batch: an array of rows, divisible by `number`.
      real_rows: how many rows at the front are real; None for a batch without padding.
    """
    rows = PartitionSpec("replica")
    mask = None if real_rows is None else np.arange(len(batch)) < real_rows

    def run(replicated, batch, mask):
        mask = None if mask is None else mask.astype(np.float32)
        with replica_context.enter(SimulatedContext(number, rows=len(batch), row_mask=mask)):
            return step(replicated, batch)

    mesh = Mesh(np.array(jax.devices()[:number]), ("replica",))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), rows, rows),
                                 out_specs=(rows, PartitionSpec()), check_vma=False))(replicated, batch, mask)
