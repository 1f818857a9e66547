"""What each device holds under strategies that split the state: at rest, while it is made, and in a step."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute
from trainer.core.compile import jit
from trainer.engine.step.compiled_phase import CompiledPhase

DEVICES = 8
STRATEGIES = {
    "mirrored": distribute.MirroredStrategy,
    "fully_sharded": distribute.FullyShardedStrategy,
    "sharded_optimizer": lambda: distribute.FullyShardedStrategy(level="optimizer"),
    "central_storage": distribute.CentralStorageStrategy,
    "model_parallel": lambda: distribute.ModelParallelStrategy(
        {"replica": 2, "model": 4}, layout_map={"Dense_.*/kernel": (None, "model")}),
    "hybrid": lambda: distribute.FullyShardedStrategy(mesh_shape={"replica": 2, "shard": 4}),
    "sharded_model": lambda: distribute.ModelParallelStrategy(
        {"replica": 1, "shard": 4, "model": 2}, layout_map={"Dense_.*/kernel": (None, "model")}),
}


class Layers(nn.Module):
    """Twelve layers, of 100 million parameters at a width of 2896."""

    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(12):
            x = nn.tanh(nn.Dense(self.width)(x))
        return x


def model_of(name, width):
    with STRATEGIES[name]().scope():
        model = trainer.Model(Layers(width), seed=0)
        model.compile("adam", "mse")
    return model


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def step_memory(name, width=2896, rows=64):
    """Returns the memory analysis of a train step, and the bytes of the state, without allocating it."""
    model = model_of(name, width)
    x = np.zeros((rows, width), np.float32)
    shapes = model.state_shapes(x)
    phase = CompiledPhase("train", model.train_step, model.strategy, steps_per_execution=1, eager=False)
    phase.trace(shapes, (x, x))
    return phase.lowered((x, x)).compile().memory_analysis(), bytes_of(shapes)


def peak(analysis):
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + outputs


@pytest.mark.slow
def test_a_step_on_100_million_parameters_needs_an_eighth_of_the_state_and_less_at_its_peak():
    (mirrored, state_bytes), (sharded, _), (optimizer, _) = map(
        step_memory, ("mirrored", "fully_sharded", "sharded_optimizer"))
    assert state_bytes > 3 * 4 * 100e6
    batch_bytes = 2 * 64 // DEVICES * 2896 * 4
    assert sharded.argument_size_in_bytes - batch_bytes == pytest.approx(state_bytes / DEVICES, rel=0.05)
    assert mirrored.argument_size_in_bytes - batch_bytes == pytest.approx(state_bytes, rel=0.001)
    assert optimizer.argument_size_in_bytes - batch_bytes == pytest.approx(
        state_bytes / 3 + 2 * state_bytes / 3 / DEVICES, rel=0.05)
    assert peak(sharded) < peak(optimizer) < peak(mirrored)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("mirrored", 1.0), ("fully_sharded", 1 / 8), ("central_storage", 1 / 8),
                                             ("sharded_optimizer", 1 / 3 + 2 / 3 / 8), ("model_parallel", 1 / 4),
                                             ("hybrid", 1 / 4), ("sharded_model", 1 / 8)])
def test_live_buffers_are_what_the_strategy_says_before_and_after_training(name, share):
    model = model_of(name, 512)
    x = np.zeros((16, 512), np.float32)
    model.build(x)
    for _ in range(2):
        held = [0] * DEVICES
        for leaf in jax.tree.leaves(model.state):
            for shard in leaf.addressable_shards:
                held[shard.device.id] += shard.data.nbytes
        assert held == pytest.approx([share * bytes_of(model.state)] * DEVICES, rel=0.05)
        model.fit(x, x, batch_size=8, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("fully_sharded", 0.25), ("central_storage", 0.25), ("model_parallel", 0.5)])
def test_no_device_holds_the_whole_state_while_it_is_made(name, most, monkeypatch):
    analyses = []

    def init_and_analyse(init, shardings, *args):
        shapes = jax.eval_shape(init, *args)
        compiled = jax.jit(init, out_shardings=shardings(shapes)).lower(*args).compile()
        analyses.append((compiled.memory_analysis(), bytes_of(shapes)))
        return jit.init_placed(init, shardings, *args)

    monkeypatch.setattr("trainer.engine.model.core.state_holder.init_placed", init_and_analyse)
    model, reference = model_of(name, 256), model_of("mirrored", 256)
    x = np.zeros((16, 256), np.float32)
    model.build(x)
    (analysis, whole), = analyses
    assert math.isclose(whole, 3 * 4 * 12 * (256 * 256 + 256), rel_tol=0.001)
    assert peak(analysis) < most * whole
    reference.build(x)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
