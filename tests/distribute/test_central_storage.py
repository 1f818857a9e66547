"""What `CentralStorageStrategy` copies between the host and the devices: large arrays, back only those that change."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import distribute
from trainer.core.tree_paths import named_leaves
from trainer.data.sources.groups import Group
from trainer.engine.model.core.model_core import core_of

FOUR = [f"cpu:{index}" for index in range(4)]
WIDTH = 128  # a kernel of 64 KiB
X = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(WIDTH, name="encoder")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(WIDTH, name="head")(x)


class MovesTheEncoder(trainer.Model):
    """Changes by hand what the optimizer leaves alone."""

    def train_step(self, state, batch):
        logs, state = super().train_step(state, batch)
        encoder = jax.tree.map(lambda leaf: 0.9 * leaf, state.params["encoder"])
        return logs, state.replace(params={**state.params, "encoder": encoder})


def model_of(strategy, model_class=trainer.Model, **options):
    with strategy.scope():
        model = model_class(Net(), seed=0)
        model.compile("adam", "mse", **options)
    return model


def program(model, steps):
    """Returns an execution of some train steps as GPUs get it, before XLA compiles it."""
    model.build(X)
    phase = core_of(model).prepared_phase("train", (X, X))
    stack = jax.tree.map(lambda leaf: np.stack([leaf] * steps), (X, X))
    group = phase.place_group(Group(stack, steps, len(X), first=0))
    bounds = [model.strategy.place_number(number) for number in (0, steps)]
    functions = phase.programs.functions
    return functions.function(len(X), steps > 1, None).trace(
        functions.state_shapes, phase.empty_logs, group.data, *bounds).lower(
            lowering_platforms=("cuda",)).as_text()


def moved(text):
    """Returns how many arrays a program moves to the host, of what it computed and of its own arguments."""
    to_host = re.findall(r"annotate_device_placement\((%[\w#]+)\).*\"pinned_host\"", text)
    return sum(not name.startswith("%arg") for name in to_host), sum(name.startswith("%arg") for name in to_host)


@pytest.mark.slow
def test_large_arrays_rest_on_the_host_and_small_ones_on_the_devices():
    model = model_of(distribute.CentralStorageStrategy(FOUR, min_host_bytes=2**16))
    model.build(X)
    for path, leaf in named_leaves(model.current_run.state).items():
        expected = "pinned_host" if leaf.nbytes >= 2**16 else "device"
        assert leaf.sharding.memory_kind == expected, path
    assert sum(leaf.nbytes >= 2**16 for leaf in jax.tree.leaves(model.current_run.state)) == 2 * 3


def test_on_cpus_all_arrays_rest_on_the_host_unless_a_limit_is_given():
    model = model_of(distribute.CentralStorageStrategy(FOUR))
    model.build(X)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(model.state.params)} == {"pinned_host"}


@pytest.mark.slow
def test_a_limit_says_what_is_small():
    for limit, memory in ((2**16 + 1, "device"), (2**16, "pinned_host")):
        model = model_of(distribute.CentralStorageStrategy(FOUR, min_host_bytes=limit))
        model.build(X)
        assert model.current_run.state.params["head"]["kernel"].sharding.memory_kind == memory
    with pytest.raises(ValueError, match="`min_host_bytes` must be a whole number of at least 0"):
        distribute.CentralStorageStrategy(FOUR, min_host_bytes=-1)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_only_what_changes_is_sent_back(steps):
    options = {"steps_per_execution": steps}
    central = distribute.CentralStorageStrategy(FOUR, min_host_bytes=2**16)
    assert moved(program(model_of(central, **options), steps)) == (6, 0)
    # The encoder's kernel, of which the optimizer keeps nothing, goes to the devices only.
    assert moved(program(model_of(central, freeze="encoder", **options), steps)) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [trainer.Model, MovesTheEncoder])
@pytest.mark.parametrize("steps", [1, 2])
def test_frozen_parameters_have_the_numbers_that_they_have_elsewhere(model_class, steps):
    weights = []
    for strategy in (distribute.CentralStorageStrategy(FOUR), distribute.FullyShardedStrategy(FOUR)):
        model = model_of(strategy, model_class, freeze="encoder", steps_per_execution=steps)
        model.build(X)
        before = np.asarray(model.state.params["encoder"]["kernel"])
        model.fit(X, X, batch_size=8, epochs=2, verbose=0)
        after = np.asarray(model.state.params["encoder"]["kernel"])
        assert np.array_equal(before, after) == (model_class is trainer.Model)
        weights.append(model.get_weights())
    for mine, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
