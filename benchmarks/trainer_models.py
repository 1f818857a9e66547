"""Models of the trainer for the benchmarks: compiled under a strategy, and their train step lowered."""

from __future__ import annotations

import functools

import hand_written
import numpy as np

import trainer
from trainer import distribute
from trainer.engine.model.core.model_core import core_of
from trainer.engine.step.compiled_phase import CompiledPhase

FEATURES = 784


def noise(rows: int, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs of shape `(rows, features)` and labels, at random."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(rows, features)).astype(np.float32),
            rng.integers(0, hand_written.CLASSES, rows).astype(np.int32))


class OwnStep(trainer.Model):
    """A model whose train step equals the default but is not recognized, so that XLA divides it."""

    def train_step(self, state, batch):
        return super().train_step(state, batch)


def new_model(strategy: distribute.Strategy, module, optimizer: str, make=trainer.Model, **options) -> trainer.Model:
    """Returns a compiled model, not built yet."""
    with strategy.scope():
        model = make(module)
        model.compile(optimizer, trainer.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def lowered_train_step(
    strategy: distribute.Strategy, model: trainer.Model, x, y, steps_per_execution: int | str = "auto"
):
    """Returns the execution of a train step of `fit`, traced and lowered from shapes: no state is allocated."""
    phase = CompiledPhase("train", model.train_step, strategy, steps_per_execution, False,
                          why_not_replicated=functools.partial(core_of(model).why_not_replicated, "train"))
    shapes = model.state_shapes(x)
    phase.trace(shapes, (x, y))
    return phase.lowered((x, y))
