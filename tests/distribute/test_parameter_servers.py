"""What servers hold: parts of a state, updates of each step once, staleness; and which optimizers can be split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import optimizers
from trainer.core.train_state import initial_state
from trainer.core.tree_paths import named_leaves
from trainer.distribute.parameter_server.partition import Partition
from trainer.distribute.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from trainer.distribute.parameter_server.server import ParameterServer, Push
from trainer.optimizers.update_rule import UpdateRule

PARAMS = {"a": {"kernel": np.ones((8, 4), np.float32), "bias": np.zeros(4, np.float32)},
          "b": {"kernel": np.ones((4, 6), np.float32), "bias": np.zeros(6, np.float32)}}


def state_of(optimizer, params=PARAMS, model_state=None):
    rule = UpdateRule(optimizers.get(optimizer))
    return jax.device_get(initial_state(params, model_state or {}, rule, jnp.uint32(0)))


def test_parts_have_about_equally_many_bytes():
    partition = Partition.of(PARAMS, 2)
    assert [sorted(names) for names in partition.parts] == [["a/kernel"], ["a/bias", "b/bias", "b/kernel"]]


def test_more_servers_than_parameters_leave_some_empty():
    partition = Partition.of({"w": np.ones(3)}, 3)
    assert [len(names) for names in partition.parts] == [1, 0, 0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop", "adagrad", "ftrl", optax.lamb(0.1),
                                       optax.chain(optax.clip(1.0), optax.adamw(0.1)), optax.adafactor(0.1)])
@pytest.mark.parametrize("servers", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 5))])
@pytest.mark.sampled
def test_a_state_is_the_same_after_it_was_split_and_joined(optimizer, servers):
    state = state_of(optimizer)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype) if leaf.ndim else leaf, state)
    partition = Partition.of(state.params, servers)
    partition.check(state)
    parts = [partition.state_of(state, index) for index in range(servers)]
    joined = partition.joined(
        state, [named_leaves(params) for params, _ in parts], [named_leaves(opt) for _, opt in parts])
    jax.tree.map(np.testing.assert_array_equal, joined, state)


@pytest.mark.parametrize("optimizer", [
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    optax.chain(optax.normalize_by_update_norm(), optax.scale(-0.1)),
    optax.flatten(optax.adam(0.1))], ids=["clip", "normalize", "flatten"])
def test_an_optimizer_that_looks_at_several_arrays_is_refused_on_several_servers(optimizer):
    state = state_of(optimizer)
    Partition.of(PARAMS, 1).check(state)
    with pytest.raises(ValueError, match=r"optimizer.*several.*Use `num_ps=1`"):
        Partition.of(PARAMS, 2).check(state)


def test_an_optimizer_that_needs_the_loss_as_a_function_is_refused():
    with pytest.raises(ValueError, match="value_fn"):
        Partition.of(PARAMS, 1).check(state_of(optax.lbfgs(0.1)))


# --- one server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    return loaded(False)


def loaded(scales, model_state=None):
    server = ParameterServer(scales)
    state = state_of(optax.sgd(1.0), {"w": np.zeros(2, np.float32)}, model_state)
    server.load("m", 1, state.optimizer, state.params, state.opt_state, named_leaves(state.model_state))
    return server


def push(server, version, number, grad=1.0, model_state=None):
    return server.push("m", Push(version, number, {"w": np.full(2, grad, np.float32)}, None, model_state))


def test_a_push_updates_and_a_pull_of_the_known_version_brings_nothing(server):
    first = server.pull("m", None)
    assert push(server, first.version, 0) == 0
    second = server.pull("m", first.version)
    np.testing.assert_array_equal(second.params["w"], [-1, -1])
    assert server.pull("m", second.version).params is None
    np.testing.assert_array_equal(first.params["w"], [0, 0]), "what was pulled stays as it was"


def test_staleness_counts_the_updates_between_pull_and_push(server):
    version = server.pull("m", None).version
    assert [push(server, version, number) for number in range(3)] == [0, 1, 2]


def test_a_step_is_applied_once_however_often_it_comes(server):
    version = server.pull("m", None).version
    assert [push(server, version, number) for number in (1, 0, 1, 0, 2)] == [0, 1, None, None, 2]
    assert server.snapshot("m")[0] == 3


def test_a_function_that_may_run_twice_is_applied_twice(server):
    version = server.pull("m", None).version
    push(server, version, None)
    push(server, version, None)
    assert server.snapshot("m")[0] == 2


def test_gradients_of_a_state_that_was_replaced_are_dropped(server):
    old = server.pull("m", None).version
    state = state_of(optax.sgd(1.0), {"w": np.zeros(2, np.float32)})
    server.load("m", 2, state.optimizer, state.params, state.opt_state, {})
    assert push(server, old, 0) is None
    assert server.pull("m", old).params is not None, "the same number of updates, of another state"


def test_gradients_are_divided_by_their_staleness_if_asked():
    server = loaded(True)
    version = server.pull("m", None).version
    for number in range(3):
        push(server, version, number)
    np.testing.assert_allclose(server.snapshot("m")[1]["w"], -(1 + 1 / 2 + 1 / 3), rtol=1e-6)


def test_model_state_moves_as_far_as_each_step_has_moved_it():
    server = loaded(False, {"mean": np.float32(1.0), "count": np.int32(5)})
    pulled = server.pull("m", None)
    before = pulled.model_state
    for number in range(2):
        push(server, pulled.version, number, 0.0, ({"mean": np.float32(1.5), "count": np.int32(6)}, before))
    after = server.snapshot("m")[3]
    assert (after["mean"], after["count"]) == (2.0, 7)


def test_servers_compile_an_update_once_for_states_that_come_one_after_another():
    state = state_of(optax.sgd(1.0), {"w": np.zeros(2, np.float32)})
    server = ParameterServer(False)
    for generation, optimizer in ((1, state.optimizer), (2, None)):
        server.load("m", generation, optimizer, state.params, state.opt_state, {})
        version = server.pull("m", None).version
        assert server.push("m", Push(version, 0, {"w": np.ones(2, np.float32)}, None, None)) == 0
        np.testing.assert_array_equal(server.snapshot("m")[1]["w"], [-1, -1])


# --- partitioners ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partitioner", "shape", "parts"), [
    (FixedShardsPartitioner(3), (10, 4), [3, 1]),
    (FixedShardsPartitioner(3), (2, 4), [2, 1]),
    (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
    (MinSizePartitioner(), (6, 1), [1, 1]),
    (MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
    (MaxSizePartitioner(max_shard_bytes=8, max_shards=2), (6, 1), [2, 1]),
    (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
])
def test_partitioners_say_what_those_of_tensorflow_say(partitioner, shape, parts):
    assert partitioner(shape, np.float32) == parts


def test_partitioners_check_their_arguments():
    with pytest.raises(ValueError, match="num_shards"):
        FixedShardsPartitioner(0)
