"""The collectives of a whole train step over simulated replicas.

As a program (`python -m tests.support.step_collectives 32`) it prints the collectives of a step under every strategy,
for more replicas than the test process has devices.
"""

import json
import os
import sys

if __name__ == "__main__":
    # Read once, when JAX's backend starts.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]} --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import optax
from flax import linen as nn

import trainer
from tests.support.hlo import collectives
from trainer import distribute
from trainer.engine.model.core.model_core import core_of

FEATURES, HIDDEN, CLASSES = 32, 64, 3
SHAPES = {"up/kernel": (FEATURES, HIDDEN), "up/bias": (HIDDEN,), "down/kernel": (HIDDEN, CLASSES),
          "down/bias": (CLASSES,)}
# The loss, and the accuracy's sum and count: four bytes each.
LOG_VALUES = 3


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, name="down")(nn.tanh(nn.Dense(HIDDEN, name="up")(x)))


STRATEGIES = {
    "nccl": distribute.MirroredStrategy,
    "hierarchical": lambda devices: distribute.MirroredStrategy(devices, distribute.HierarchicalCopyAllReduce()),
    "one_device": lambda devices: distribute.MirroredStrategy(devices, distribute.ReductionToOneDevice()),
    "ring": lambda devices: distribute.MirroredStrategy(devices, distribute.RingAllReduce()),
    "fully_sharded": lambda devices: distribute.FullyShardedStrategy(devices, min_shard_bytes=0),
    "sharded_optimizer": lambda devices: distribute.FullyShardedStrategy(devices, "optimizer", min_shard_bytes=0),
    "clipped": lambda devices: distribute.FullyShardedStrategy(devices, min_shard_bytes=0),
}


def step_collectives(name, number, steps_per_execution=1):
    """Returns the collectives of a train step on a full batch; "clipped" clips by the norm over all gradients."""
    with STRATEGIES[name]([f"cpu:{index}" for index in range(number)]).scope():
        model = trainer.Model(MLP(), seed=0)
        optimizer = optax.sgd(0.1, momentum=0.9)
        if name == "clipped":
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
        model.compile(optimizer, trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                      steps_per_execution=steps_per_execution)
    batch = np.zeros((2 * number, FEATURES), np.float32), np.zeros(2 * number, np.int32)
    lowered = core_of(model).prepared_phase("train", batch).lowered(batch)
    return collectives(lowered.compile().as_text())


if __name__ == "__main__":
    print(json.dumps({name: step_collectives(name, int(sys.argv[1])) for name in STRATEGIES}))
