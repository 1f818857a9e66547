"""Models of the trainer for the benchmarks: compiled under a strategy, and their train step lowered."""

from __future__ import annotations

import hand_written
import jax
import numpy as np

import trainer
from trainer import distribute
from trainer.data import Group
from trainer.phase import CompiledPhase

FEATURES = 784


def noise(rows: int, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs of shape `(rows, features)` and labels, at random."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(rows, features)).astype(np.float32),
            rng.integers(0, hand_written.CLASSES, rows).astype(np.int32))


def new_model(strategy: distribute.Strategy, module, optimizer: str, **options) -> trainer.Model:
    """Returns a compiled model, not built yet."""
    with strategy.scope():
        model = trainer.Model(module)
        model.compile(optimizer, trainer.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def lowered_train_step(strategy: distribute.Strategy, model: trainer.Model, x, y):
    """Returns the execution of `fit`'s train steps, traced and lowered. The state is not allocated: shapes will do."""
    shapes = model.state_shapes(x)
    state = jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                         shapes, strategy.state_shardings(shapes))
    phase = CompiledPhase("train", model.train_step, strategy, "auto", False)
    phase.prepare(state, (x, y))
    stack = jax.tree.map(lambda leaf: leaf[None], (x, y))
    group = strategy.place_group(Group(stack, count=1, rows=len(x), first=0), phase.stack_size(len(x), 1, 1))
    return phase._execute.lower(state, phase.empty_logs, group.data, group.mask, group.device_count)
