"""Reductions over simulated replicas, and the collectives to which XLA compiles them.

As a program (`python -m tests.support.reductions 32`) it prints the collectives of every algorithm, for more
replicas than the test process has devices.
"""

import json
import os
import sys

if __name__ == "__main__":
    # Read once, when JAX's backend starts.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]} --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tests.support.hlo import collectives
from trainer.distribute.replica.collectives import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)

AXIS = "replica"
ALGORITHMS = {
    "nccl": NcclAllReduce(),
    "hierarchical": HierarchicalCopyAllReduce(),
    "one_device": ReductionToOneDevice(),
    "ring": RingAllReduce(),
}
# Gradients of 39 floats: no number of replicas tested divides it.
GRADIENTS = {"kernel": np.zeros((7, 5), np.float32), "bias": np.zeros(3, np.float32), "scale": np.zeros((), np.float32)}
GRADIENT_SIZE = 39


def on_replicas(function, number):
    """Returns a compiled function that runs `function` on each replica.

    Each replica gets its entry along the first axis of the arguments' leaves, and its results are stacked along that of
    the outputs' leaves.
    """
    def one(*args):
        own = jax.tree.map(lambda leaf: leaf[0], args)
        return jax.tree.map(lambda leaf: leaf[None], function(*own))

    mesh = Mesh(np.array(jax.devices()[:number]), (AXIS,))
    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def compiled_collectives(function, number, tree):
    """Returns the collectives that `function` of one replica's tree compiles to."""
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * number), tree)
    return collectives(on_replicas(function, number).lower(stacked).compile().as_text())


def collectives_of_algorithms(number):
    """Returns the collectives that a mean of `GRADIENTS` compiles to, by the algorithm's name."""
    return {name: compiled_collectives(lambda tree, ops=ops: ops.all_reduce("mean", tree, AXIS, number),
                                       number, GRADIENTS)
            for name, ops in ALGORITHMS.items()}


if __name__ == "__main__":
    print(json.dumps(collectives_of_algorithms(int(sys.argv[1]))))
