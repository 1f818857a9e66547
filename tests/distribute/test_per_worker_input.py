"""`fit` on data that each worker reads for itself."""

from __future__ import annotations

import os
import signal
import time

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from trainer import callbacks, distribute
from trainer.distribute.experimental import partitioners
from trainer.engine.model.core.model_core import core_of

pytestmark = pytest.mark.processes
rng = np.random.default_rng(0)
x = rng.normal(size=(48, 5)).astype(np.float32)
y = (x @ rng.normal(size=(5, 3))).argmax(-1)


@pytest.fixture(scope="module")
def strategy():
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=1) as strategy:
        yield strategy


def made(strategy, **options):
    with strategy.scope():
        model = trainer.Sequential([nn.Dense(3)], seed=0)
        model.compile(optax.sgd(0.1), trainer.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def endless(context):
    rows = np.arange(context.input_pipeline_id, len(x), context.num_input_pipelines)
    while True:
        yield from ((x[part], y[part]) for part in np.split(rows, len(rows) // 8))


@pytest.mark.parametrize("on_device", ["auto", False])
def test_workers_read_their_own_data(strategy, tmp_path, on_device):
    def noted(context):
        for number, batch in enumerate(endless(context)):
            (tmp_path / f"{context.input_pipeline_id} of {context.num_input_pipelines} {os.getpid()} {number}").touch()
            yield batch

    model = made(strategy, data_on_device=on_device)
    history = model.fit(strategy.distribute_datasets_from_function(noted), steps_per_epoch=20, epochs=2, verbose=0)
    assert int(model.state.step) == 40
    assert history.history["loss"][1] < history.history["loss"][0]
    read = [name.name.split() for name in tmp_path.iterdir()]
    assert {pipeline for pipeline, *_ in read} == {"0", "1"} and {count for _, _, count, *_ in read} == {"2"}
    of_chief = [name for name in read if name[3] == str(os.getpid())]
    assert len(of_chief) == 1  # the first batch, for its shapes
    assert len(read) - len(of_chief) == 40


def test_one_worker_trains_the_batches_in_their_order():
    batches = [(x[start:start + 8], y[start:start + 8]) for start in range(0, 48, 8)]
    with distribute.ParameterServerStrategy(num_workers=1, num_ps=1) as strategy:
        model = made(strategy)
        model.fit(strategy.distribute_datasets_from_function(lambda context: batches), steps_per_epoch=6, verbose=0)
    expected = made(distribute.OneDeviceStrategy())
    expected.fit(batches, verbose=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), model.state.params,
                 expected.state.params)


class Bag(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(3)(nn.Embed(40, 4)(ids).mean(1))


def test_tables_by_rows_get_the_rows_of_batches_that_workers_read():
    ids = rng.integers(0, 40, size=(48, 5))

    def batches(context=None):
        while True:
            for start, stop in ((0, 20), (20, 40), (40, 48)):
                yield ids[start:stop], y[start:stop]

    def compiled(strategy):
        with strategy.scope():
            model = trainer.Model(Bag(), seed=0)
            model.compile("adagrad", trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with distribute.ParameterServerStrategy(
            num_workers=1, num_ps=2, variable_partitioner=partitioners.FixedShardsPartitioner(2)) as strategy:
        model = compiled(strategy)
        history = model.fit(strategy.distribute_datasets_from_function(batches), steps_per_epoch=6, epochs=2, verbose=0)
        assert strategy._models[core_of(model).state]._partition.tables == {"Embed_0/embedding"}
    expected = compiled(distribute.OneDeviceStrategy())
    reference = expected.fit(batches(), steps_per_epoch=6, epochs=2, verbose=0)
    assert history.history["loss"] == pytest.approx(reference.history["loss"], rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), model.state.params,
                 expected.state.params)


def test_batches_of_other_sizes_count_their_rows():
    sizes = [8, 3, 8]
    with distribute.ParameterServerStrategy(num_workers=1, num_ps=1) as strategy:
        model = made(strategy)
        history = model.fit(strategy.distribute_datasets_from_function(
            lambda context: [(x[:size], y[:size]) for size in sizes]), steps_per_epoch=3, verbose=0)
    expected = made(distribute.OneDeviceStrategy())
    reference = expected.fit(((x[:size], y[:size]) for size in sizes), steps_per_epoch=3, verbose=0)
    assert history.history["loss"] == pytest.approx(reference.history["loss"], rel=1e-5)


def test_a_worker_that_is_killed_is_replaced_and_reads_again(strategy, tmp_path):
    def dies_once(context):
        died = tmp_path / "died"
        for number, batch in enumerate(endless(context)):
            if context.input_pipeline_id == 1 and number == 5 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            # Workers take steps as they are free: the other waits, or it might take all before this one has six.
            while context.input_pipeline_id == 0 and number > 5 and not died.exists():
                time.sleep(0.01)
            yield batch

    model = made(strategy)
    with pytest.warns(UserWarning, match="worker 1"):
        model.fit(strategy.distribute_datasets_from_function(dies_once), steps_per_epoch=60, verbose=0)
    assert int(model.state.step) == 60


def test_a_run_goes_on_though_nobody_knows_where_workers_stood(strategy, tmp_path):
    def random(context):
        while True:
            rows = np.random.default_rng().integers(len(x), size=8)
            yield x[rows], y[rows]

    def run(epochs):
        model = made(strategy)
        model.fit(strategy.distribute_datasets_from_function(random), steps_per_epoch=10, epochs=epochs, verbose=0,
                  callbacks=[callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)])
        return int(model.state.step)

    assert run(1) == 10
    with pytest.warns(UserWarning, match="The training data do not match"):
        assert run(3) == 30


def test_a_dataset_of_workers_may_be_distributed_in_the_worker(strategy):
    # As in TensorFlow's tutorial.
    def per_worker():
        return strategy.distribute_datasets_from_function(endless)

    coordinator = distribute.ClusterCoordinator(strategy)
    for dataset in (coordinator.create_per_worker_dataset(per_worker),
                    coordinator.create_per_worker_dataset(strategy.distribute_datasets_from_function(endless))):
        iterator = iter(dataset)
        model = made(strategy)
        model.build(x[:2])

        def rows(iterator=iterator):
            return strategy.run(lambda batch: batch[0].shape[0], args=(next(iterator),))

        values = [coordinator.schedule(rows) for _ in range(4)]
        assert all(int(np.ravel(value)[0]) in (8,) for value in coordinator.fetch(values))


@pytest.mark.parametrize(("read", "message"), [
    (lambda context: iter([]), "no more batches"),
    (lambda context: 1 / 0, "could not be made: ZeroDivisionError"),
    (lambda context: [(x[:8], y[:8])] + [(x[:8, :4], y[:8])] * 99, "differs from the first batch"),
    (lambda context: [(x[:8], y[:8])] + [(x[:8], y[:8] + 7)] * 99, r"label (7|8|9), but the model has 3"),
    (lambda context: [(x[:8], y[:8])] * 4, "no more batches"),
])
def test_data_that_cannot_be_trained_on_are_an_error(strategy, read, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        made(strategy).fit(strategy.distribute_datasets_from_function(read), steps_per_epoch=40, verbose=0)


def test_what_the_chief_would_read_is_refused(strategy):
    model, data = made(strategy), strategy.distribute_datasets_from_function(endless)
    with pytest.raises(ValueError, match="data are endless"):
        model.fit(data, verbose=0)
    with pytest.raises(ValueError, match="per-worker dataset"):
        model.fit(data, y, steps_per_epoch=2, verbose=0)
    with pytest.raises(ValueError, match="`class_weight` cannot be used with data that workers read"):
        model.fit(data, class_weight={0: 1.0}, steps_per_epoch=2, verbose=0)
    model.fit(data, steps_per_epoch=2, verbose=0)
    with pytest.raises(RuntimeError, match="`fit` alone reads data on the workers"):
        model.evaluate(data, steps=2, verbose=0)
