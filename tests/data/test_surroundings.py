"""Pipelines of a `fit`: each batch is made in the context in which `fit` was called, by whatever thread makes it."""

from __future__ import annotations

import contextvars
import threading

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer.core.replica_context import in_replica_context
from trainer.data import PyDataset, RowDataset
from trainer.data.adapt import adapt
from trainer.data.reader import Reader
from trainer.distribute import get_strategy, has_strategy
from trainer.utils import custom_object_scope, get_registered_object

user_variable = contextvars.ContextVar("user_variable", default=None)
BATCHES, ROWS = 6, 8


class Looks:
    """What the code of a pipeline finds around it, and in which threads."""

    def __init__(self):
        self.seen, self.threads = [], set()

    def look(self):
        config = jax.config
        draw = np.asarray(jax.random.uniform(jax.random.PRNGKey(7), (2, 3))).tolist()
        self.seen.append((
            get_strategy().num_replicas_in_sync, has_strategy(), in_replica_context(), user_variable.get(),
            get_registered_object("largest"), config.jax_threefry_partitionable, config.jax_default_matmul_precision,
            config.jax_numpy_rank_promotion, str(config.jax_numpy_dtype_promotion), config.jax_default_device, draw))
        self.threads.add(threading.current_thread().name.rstrip("_0123456789"))


def batch():
    return np.ones((ROWS, 3), np.float32), np.ones((ROWS, 1), np.float32)


def generator(looks):
    for _ in range(BATCHES):
        looks.look()
        yield batch()
    looks.look()


class Items:
    """An indexed object; what makes it a `PyDataset` is added below."""

    def __init__(self, looks, **kwargs):
        super().__init__(**kwargs)
        self.looks = looks

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        self.looks.look()
        return batch()

    def on_epoch_end(self):
        self.looks.look()


class Data(Items, PyDataset):
    pass


class Rows:
    def __init__(self, looks):
        self.looks = looks

    def __len__(self):
        return BATCHES * ROWS

    def __getitem__(self, number):
        self.looks.look()
        return np.ones(3, np.float32), np.ones(1, np.float32)


def looking(looks, *arrays):
    looks.look()
    return arrays


def mapped(looks):
    arrays = np.ones((BATCHES * ROWS, 3), np.float32), np.ones((BATCHES * ROWS, 1), np.float32)
    return trainer.data.Dataset.from_arrays(arrays).batch(ROWS).map(lambda *each: looking(looks, *each))


def of_rows(looks):
    return RowDataset(Rows(looks), num_threads=2).map(lambda *each: looking(looks, *each)).batch(ROWS).map(
        lambda *each: looking(looks, *each))


# How the data are made, and which of the trainer's or Grain's threads run the user's code.
PIPELINES = {
    "generator": (generator, {"trainer-prefetch"}),
    "indexed": (Items, {"trainer-prefetch"}),
    "threads": (lambda looks: Data(looks, workers=2), {"trainer-prefetch", "trainer-py-dataset"}),
    "mapped": (mapped, {"trainer-prefetch"}),
    "rows": (of_rows, {"grain-prefetch"}),
}


def new_model():
    model = trainer.Model(nn.Dense(1), seed=0)
    model.compile(trainer.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_each_batch_is_made_in_the_context_of_fit(name, devices):
    make, threads = PIPELINES[name]
    looks, strategy = Looks(), trainer.distribute.MirroredStrategy(devices[:4])
    token = user_variable.set("the user's")
    try:
        with (strategy.scope(), custom_object_scope({"largest": max}), jax.threefry_partitionable(False),
              jax.default_matmul_precision("float32"), jax.numpy_rank_promotion("raise"),
              jax.numpy_dtype_promotion("strict"), jax.default_device(devices[1])):
            new_model().fit(make(looks), epochs=2 if name != "generator" else 1, verbose=0)
            expected = Looks()
            expected.look()
    finally:
        user_variable.reset(token)
    assert len(looks.seen) >= BATCHES and threads <= looks.threads
    assert [each for each in looks.seen if each != expected.seen[0]] == []
    assert expected.seen[0][:5] == (4, True, False, "the user's", max)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_the_next_fit_has_its_own_context(name):
    make, _ = PIPELINES[name]
    looks, model = Looks(), new_model()
    with jax.default_matmul_precision("float32"):
        model.fit(make(looks), epochs=1, verbose=0)
    first = len(looks.seen)
    model.fit(make(looks), epochs=1, verbose=0)
    found = [each[6] for each in looks.seen]
    assert found == ["float32"] * first + [None] * first


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluation_and_prediction_read_in_their_context(method):
    looks = Looks()
    with jax.numpy_rank_promotion("raise"):
        getattr(new_model(), method)(generator(looks), verbose=0)
    assert {each[7] for each in looks.seen} == {"raise"} and "trainer-prefetch" in looks.threads


def test_a_distributed_dataset_is_read_in_the_context_of_its_iteration(devices):
    looks, strategy = Looks(), trainer.distribute.MirroredStrategy(devices[:2])
    with strategy.scope(), jax.numpy_rank_promotion("raise"):
        assert len(list(strategy.experimental_distribute_dataset(generator(looks)))) == BATCHES
    assert {(each[0], each[7]) for each in looks.seen} == {(2, "raise")} and looks.threads == {"trainer-prefetch"}


@pytest.mark.slow
def test_a_global_batch_size_computed_in_the_pipeline_is_that_of_the_strategy(devices):
    rows = []

    def batches():
        for _ in range(BATCHES):
            rows.append(2 * get_strategy().num_replicas_in_sync)
            yield np.ones((rows[-1], 3), np.float32), np.ones((rows[-1], 1), np.float32)

    with trainer.distribute.MirroredStrategy(devices[:4]).scope():
        new_model().fit(batches(), epochs=1, verbose=0)
    assert rows == [8] * BATCHES


@pytest.mark.slow
def test_random_numbers_of_a_pipeline_are_those_of_its_context():
    def batches():
        for step in range(BATCHES):
            x = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.PRNGKey(7), step), (ROWS, 3)))
            yield x, x.sum(1, keepdims=True)

    def trained(data):
        model = new_model()
        return model.fit(data, epochs=1, shuffle=False, verbose=0).history["loss"], model.get_weights()

    with jax.threefry_partitionable(False):
        before = list(batches())
        (loss, weights), (expected_loss, expected) = trained(batches()), trained(before)
    assert not np.array_equal(before[0][0], next(batches())[0])  # the option matters
    assert loss == expected_loss
    for found, weight in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(found, weight)


class TellsOptions(PyDataset):
    """Batches that tell the options of the process that makes them."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        config = jax.config
        return np.full((2, 1), float(config.jax_threefry_partitionable)), np.array(
            [[config.jax_numpy_rank_promotion == "raise"], [has_strategy()]], np.float32)


class AsksForTheStrategy(TellsOptions):
    def __getitem__(self, index):
        return np.full((get_strategy().num_replicas_in_sync, 1), index)


def read(data):
    with Reader(adapt(data)) as reader:
        return [jax.tree.map(lambda leaf, number=number: leaf[number].tolist(), group.data)
                for group in reader.read(0) for number in range(group.count)]


@pytest.mark.slow
def test_processes_make_batches_under_the_jax_options_of_the_pass():
    with jax.threefry_partitionable(False), jax.numpy_rank_promotion("raise"):
        found = read(TellsOptions(workers=2, use_multiprocessing=True))
    assert found == [([[0.0], [0.0]], [[1.0], [0.0]])] * 4
    assert read(TellsOptions(workers=1, use_multiprocessing=True)) == [([[1.0], [1.0]], [[0.0], [0.0]])] * 4


@pytest.mark.slow
def test_a_process_that_asks_for_the_strategy_in_scope_is_told_how_to_get_it(devices):
    data = AsksForTheStrategy(workers=1, use_multiprocessing=True)
    with trainer.distribute.MirroredStrategy(devices[:4]).scope():
        assert {labels[1][0] for _, labels in read(TellsOptions(workers=1, use_multiprocessing=True))} == {1.0}
        with pytest.raises(RuntimeError, match=r"(?s)works for another, where MirroredStrategy.* is in scope.*"
                                               r"keep what is needed, such as `num_replicas_in_sync`, as an attribute"):
            read(data)
    assert len(read(data)) == 4  # without a scope there is nothing to miss
