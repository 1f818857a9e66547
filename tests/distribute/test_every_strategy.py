"""Every strategy gives one device's numbers, whatever trains under it, and keeps the state where it says.

`strategy_cases.py` says which combinations are tried.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import trainer
from tests.support import strategy_cases
from tests.support.networks import classification, logits_loss
from tests.support.strategy_cases import CASES, STRATEGIES, Case, LinenNet, NNXNet, applies, pairs_of
from trainer import callbacks
from trainer.core.tree_paths import named_leaves
from trainer.testing import assert_strategies_equal

TOLERANCES = {"bfloat16": {"rtol": 2e-2, "atol": 2e-3}}
# One of each kind of placement.
PLACING = ("mirrored", "central_storage", "fully_sharded", "sharded_optimizer", "model_parallel")


def test_each_pair_of_factors_occurs():
    everything = [Case(option, way, library, is_even) for option, way, library, is_even in itertools.product(
        strategy_cases.OPTIONS, strategy_cases.WAYS, strategy_cases.NETS, (True, False)) if applies(option, way)]
    possible = {pair for case in everything for name in STRATEGIES for pair in pairs_of(case, name)}
    assert possible == {pair for case, names in CASES.items() for name in names for pair in pairs_of(case, name)}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:The `cross_device_ops` of")  # some steps are partitioned
@pytest.mark.parametrize(("case", "names"), CASES.items(), ids=map(str, CASES))
def test_every_strategy_gives_one_devices_numbers(case, names):
    assert_strategies_equal(
        case.build, case.data, [STRATEGIES[name] for name in names], batch_size=case.batch_size,
        epochs=strategy_cases.EPOCHS, train=case.train_by_hand if case.way == "loop" else None,
        evaluate=case.option == "sample_weights", predict=case.option == "plain" and case.is_even,
        **TOLERANCES.get(case.option, {}))


# --- where the state lives --------------------------------------------------------------------------------------------

WHOLE, ROWS, COLUMNS = PartitionSpec(), PartitionSpec("replica"), PartitionSpec(None, "replica")
IN_COPIES = {"first": WHOLE, "first_bias": WHOLE, "last": WHOLE}
IN_PARTS = {"first": COLUMNS, "first_bias": ROWS, "last": ROWS}
OVER_MODEL = {"first": PartitionSpec(None, "model"), "first_bias": WHOLE, "last": PartitionSpec("model", None)}
OVER_SHARDS = {"first": PartitionSpec(None, "shard"), "first_bias": PartitionSpec("shard"),
               "last": PartitionSpec("shard")}
# The layout takes the longer axis of the first kernel, and the only axis of the last kernel that divides.
OVER_BOTH = {"first": PartitionSpec("shard", "model"), "first_bias": PartitionSpec("shard"),
             "last": PartitionSpec("model")}
# For each strategy: how parameters are split, how their moments are, and the memory of all, None for the default.
PLACEMENTS = {
    **dict.fromkeys(STRATEGIES, (IN_COPIES, IN_COPIES, None)),
    # Its arrays below 4096 bytes stay whole, and on the devices.
    "central_storage": ({**IN_COPIES, "first": COLUMNS}, {**IN_COPIES, "first": COLUMNS}, "pinned_host"),
    "fully_sharded": (IN_PARTS, IN_PARTS, None),
    "sharded_optimizer": (IN_COPIES, IN_PARTS, None),
    "model_parallel": (OVER_MODEL, OVER_MODEL, None),
    "hybrid": (OVER_SHARDS, OVER_SHARDS, None),
    "sharded_model": (OVER_BOTH, OVER_BOTH, None),
}
LINEN_PATHS = {"first": "Dense_0/kernel", "first_bias": "Dense_0/bias", "last": "Dense_1/kernel"}
NNX_PATHS = {"first": "first/kernel", "first_bias": "first/bias", "last": "last/kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("net", "paths"), [(LinenNet, LINEN_PATHS), (NNXNet, NNX_PATHS)])
def test_parameters_and_moments_are_where_the_strategy_says(net, paths, name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = trainer.Model(net(batch_norm=True))
        model.compile(optax.sgd(0.1, momentum=0.9), logits_loss())
    model.build(np.zeros((1, strategy_cases.FEATURES), np.float32))
    state, (of_params, of_moments, memory) = model.state, PLACEMENTS[name]
    for tree, specs in ((state.params, of_params), (state.opt_state, of_moments)):
        for which, spec in specs.items():
            (leaf,) = [leaf for path, leaf in named_leaves(tree).items() if path.endswith(paths[which])]
            expected = NamedSharding(strategy.mesh, spec, memory_kind=memory if leaf.nbytes >= 4096 else None)
            assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), paths[which]
            assert leaf.is_fully_replicated == (spec == WHOLE)
    for leaf in jax.tree.leaves(state.model_state):
        assert leaf.is_fully_replicated and leaf.sharding.memory_kind == "device"
    assert in_place(strategy, state)


def in_place(strategy, state):
    """Tells whether each array of a state lives where the strategy keeps it."""
    shardings = strategy.state_shardings(state)
    return all(leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
               for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True))


def change_between_trainings(strategy, model, data):
    """Trains with all that users do to a model in between; checks where the state lives, and returns the logs."""
    x, y = data
    logs = {}

    def train(after):
        if model.built:
            assert in_place(strategy, model.current_run.state), f"before training, after {after}"
        logs[f"loss after {after}"] = model.train_on_batch(*data)
        assert in_place(strategy, model.current_run.state), f"after training, after {after}"

    train("nothing")
    state = model.state
    model.state = jax.tree.map(np.asarray, state.replace(
        params=jax.tree.map(lambda leaf: 0.5 * np.asarray(leaf), state.params)))
    train("assigning a state from the host")
    model.state = state
    train("assigning the first state")
    logs["the first state's"] = sum(float(np.asarray(leaf).sum()) for leaf in jax.tree.leaves(state.params))
    model.set_weights([0.9 * weight for weight in model.get_weights()])
    train("setting weights")
    model.optimizer.learning_rate = 0.25
    assert model.optimizer.learning_rate == 0.25
    train("setting the learning rate")
    assert model.optimizer.learning_rate == 0.25
    stopping = callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    logs["loss"] = model.fit(x, y, batch_size=len(x), epochs=4, callbacks=[stopping], verbose=0).history["loss"]
    assert (len(logs["loss"]), stopping.best_epoch) == (2, 0)
    for weight, best in zip(model.get_weights(), stopping.best_weights, strict=True):
        np.testing.assert_array_equal(weight, best)
    train("early stopping")
    logs["outputs"] = np.asarray(model(x[:5]))
    np.testing.assert_allclose(model.predict(x[:5], verbose=0), logs["outputs"], rtol=1e-4, atol=1e-5)
    model.compile(optax.adam(0.01, eps=1e-3), logits_loss(), steps_per_execution=1)
    train("compiling again")
    return logs


def build_linen(batch_norm="global", **options):
    """Returns a compiled model, with BatchNorm unless it is None."""
    model = trainer.Model(LinenNet(batch_norm=batch_norm is not None))
    model.compile(optax.sgd(0.1, momentum=0.9), logits_loss(), steps_per_execution=1,
                  batch_norm=batch_norm or "global", **options)
    return model


def strategies(*names):
    return [STRATEGIES[name] for name in names]


@pytest.mark.slow
def test_a_model_that_is_changed_between_trainings_gives_one_devices_numbers_and_stays_in_its_place():
    x, y, _ = classification(13, strategy_cases.FEATURES, strategy_cases.CLASSES)
    assert_strategies_equal(build_linen, (x, y), strategies(*PLACING), train=change_between_trainings, evaluate=False,
                            predict=False)


@pytest.mark.slow
def test_steps_that_run_eagerly_give_one_devices_numbers_and_leave_the_state_in_its_place():
    # A small program, as each of its operations compiles on its own.
    x, y, _ = classification(7, strategy_cases.FEATURES, strategy_cases.CLASSES)

    def fit(strategy, model, data):
        history = model.fit(*data, epochs=2, verbose=0).history
        assert in_place(strategy, model.current_run.state)
        return history

    assert_strategies_equal(lambda: build_linen(batch_norm=None, run_eagerly=True), (x, y), strategies(*PLACING),
                            train=fit, evaluate=False, predict=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACING)
def test_an_nnx_module_gets_the_trained_weights_where_its_user_can_call_it(name):
    x, y, _ = classification(8, strategy_cases.FEATURES, strategy_cases.CLASSES)
    with STRATEGIES[name]().scope():
        net = NNXNet()
        model = trainer.Model(net)
        model.compile("sgd", logits_loss())
    untrained = np.asarray(net(x))
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    outputs = net(x)
    assert len(outputs.devices()) == 1 and np.abs(outputs - untrained).max() > 0.01
    np.testing.assert_allclose(outputs, model(x), rtol=1e-4, atol=1e-5)


# --- what replicas must agree on --------------------------------------------------------------------------------------


def copies_of(array):
    """Returns what each device holds of an array."""
    return [np.asarray(shard.data) for shard in array.addressable_shards]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nccl", "fully_sharded"])
def test_running_averages_of_each_replicas_rows_become_their_mean_in_a_loop_of_ones_own_as_in_fit(name):
    case = Case("batch_norm", "loop", "linen", is_even=True)

    def trained(train):
        strategy = STRATEGIES[name]()
        with strategy.scope():
            model = build_linen(batch_norm="per_replica")
        train(strategy, model)
        for leaf in jax.tree.leaves(model.state.model_state):
            assert len({copy.tobytes() for copy in copies_of(leaf)}) == 1
        return model.get_weights()

    def fit(strategy, model):
        model.fit(*case.data, batch_size=case.batch_size, epochs=strategy_cases.EPOCHS, shuffle=False, verbose=0)

    by_hand = trained(lambda strategy, model: case.train_by_hand(strategy, model, case.data))
    for ours, theirs in zip(by_hand, trained(fit), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_nnx_object_normalizes_by_the_whole_batch_in_a_custom_loop():
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    strategy = STRATEGIES["nccl"]()
    norm = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))

    def step(norm, x):
        return norm(x).sum()

    for batch in strategy.experimental_distribute_dataset(trainer.data.Dataset.from_arrays(x).batch(8)):
        strategy.run(step, args=(norm, batch))
    assert [float(copy[0]) for copy in copies_of(norm.mean[...])] == [0.5 * 3.5] * 4
    assert [float(copy[0]) for copy in copies_of(norm.var[...])] == [0.5 * 1 + 0.5 * 5.25] * 4  # of 0 to 7
    assert type(norm) is nnx.BatchNorm


@pytest.mark.slow
def test_weights_in_16_bits_train_where_another_axis_of_the_mesh_is_left_to_the_compiler():
    case = Case("plain", "train_step", "linen", is_even=True)
    assert_strategies_equal(lambda: build_linen(batch_norm=None, precision="bfloat16"), case.data,
                            strategies("model_parallel", "fully_sharded"), batch_size=8, evaluate=False, predict=False,
                            rtol=5e-2, atol=2e-2)


@pytest.mark.slow
def test_a_loss_scale_is_lowered_as_often_on_eight_replicas_as_on_one_device():
    def build():
        model = trainer.Model(nn.Dense(1, kernel_init=nn.initializers.zeros))
        model.compile(optax.sgd(0.1), "mse", precision="mixed_float16", steps_per_execution=1)
        return model

    # The gradients of outputs are 0.25 and -0.25. Times the loss scale, 2**15, and times 8, as in a replica's share of
    # the loss, they are beyond float16.
    data = np.eye(8, dtype=np.float32), np.float32([[1], [-1]] * 4)

    def fit(strategy, model, data):
        history = model.fit(*data, batch_size=8, verbose=0).history
        assert history["skipped_steps"] == [0]
        return history

    assert_strategies_equal(build, data, [trainer.distribute.MirroredStrategy], train=fit, rtol=1e-2)
