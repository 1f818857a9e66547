"""Data over processes: shared by policy, sharded at the source, or made by each, with the numbers of one process."""

from __future__ import annotations

import itertools
import os

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import trainer
from tests.support.networks import NNXMLP, LinenMLP, classification, logits_loss, mirrored
from trainer import callbacks as cb
from trainer import distribute
from trainer.data import Dataset, with_options
from trainer.data.adapt import adapt
from trainer.data.sharding.processes import Processes
from trainer.data.sources.groups import LocalRows
from trainer.testing import LocalCluster

pytestmark = pytest.mark.processes

X, Y, _ = classification(45)
BATCH_SIZE = 8  # a last batch of 5 rows, which 4 replicas pad


def new_model():
    """Returns a model of the strategy in scope, which may be trained again and again from its first state."""
    model = trainer.Model(LinenMLP(), seed=1)
    model.compile(trainer.optimizers.SGD(0.1, momentum=0.9), logits_loss(), metrics=["accuracy"])
    model.build(X)
    return model


def fitted(model, state, data, **options):
    """Trains from a state, evaluates and predicts; `data()` returns what is read."""
    model.state = state
    history = model.fit(data(), epochs=2, validation_data=data(), verbose=0, **options)
    return {"weights": model.get_weights(), "history": history.history, "logs": model.evaluate(data(), verbose=0),
            "predictions": model.predict(data(), verbose=0)}


class Batches:
    """Re-iterable batches of given rows: a list of `(start, stop)`."""

    def __init__(self, slices):
        self.slices = slices

    def __iter__(self):
        return ((X[start:stop], Y[start:stop]) for start, stop in self.slices)


WHOLE = [(start, min(start + BATCH_SIZE, len(X))) for start in range(0, len(X), BATCH_SIZE)]


def own(ways):
    """Returns what each process has of the batches `WHOLE`, and one process all of.

    Args:
      ways: of each batch, how many rows process 0 has; None for all of it, so that process 1 has no such batch.
    """
    if jax.process_count() == 1:
        return Batches(WHOLE)
    process = jax.process_index()
    parts = [(start, stop if way is None else start + way) if process == 0 else (start + (way or 0), stop)
             for (start, stop), way in zip(WHOLE, ways, strict=True) if process == 0 or way is not None]
    return with_options(Batches(parts), "off")


READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def grain_rows(loaded=None):
    """A Grain dataset; the numbers of the rows that are loaded are appended to `loaded`."""
    def load(row):
        if loaded is not None:
            loaded.append(int(row))
        return X[row], Y[row]

    return grain.MapDataset.range(len(X)).shuffle(seed=3).map(load)


def grain_batches(loaded=None):
    return grain_rows(loaded).batch(BATCH_SIZE).to_iter_dataset(READ_AHEAD)


def grain_batches_of_iterator(loaded=None):
    return grain_rows(loaded).to_iter_dataset(READ_AHEAD).batch(BATCH_SIZE)


FEEDS = {
    "iterable, auto": lambda: Batches(WHOLE),
    "iterable, data": lambda: with_options(Batches(WHOLE), distribute.AutoShardPolicy.DATA),
    "iterable, off, equal": lambda: own([4, 4, 4, 4, 4, 2]),
    "iterable, off, odd": lambda: own([5, 3, 7, 1, 4, 3]),
    "iterable, off, one process ends first": lambda: own([4, 4, 4, 4, None, None]),
    "dataset, auto": lambda: Dataset.from_arrays((X, Y)).batch(BATCH_SIZE),
    "grain": grain_batches,
    "grain, rows of an iterator": grain_batches_of_iterator,
    "grain, a step after": lambda: grain_rows().batch(BATCH_SIZE).map(lambda batch: batch),
    "grain, data": lambda: with_options(grain_batches(), "data"),
}


def train_by_hand(strategy, model, state, inputs_of):
    """Returns what a loop of one's own gives: each step's loss, the rows that it gathered, and the weights."""
    def step(state, inputs, scale, offset):
        x, y = inputs

        def loss_fn(params):
            y_pred, _ = model.apply(params, state, x, training=True)
            return model.compute_loss(x, y, y_pred, None)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), (loss, x.sum(1) * scale + offset)

    losses, rows, means = [], [], []
    for inputs in inputs_of():
        state, (loss, sums) = strategy.run(step, args=(state, inputs, jnp.float32(2.0), np.ones((), np.float32)))
        losses.append(float(strategy.reduce("mean", loss)))
        means.append(float(strategy.reduce("mean", sums, axis=0)))
        rows.append(strategy.gather(sums))
        local = strategy.experimental_local_results((sums, 7))
        assert [seven for _, seven in local] == [7] * (4 // jax.process_count())
        start = jax.process_index() * len(local)
        counts = [len(one) for one in sums.values]
        np.testing.assert_array_equal(np.concatenate([one for one, _ in local]),
                                      rows[-1][sum(counts[:start]):sum(counts[:start + len(local)])])
    return {"losses": losses, "means": means, "rows": np.concatenate(rows),
            "weights": [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]}


def dealt(context):
    """Returns this process's batches for its replicas, of which four make the batch of a step."""
    assert context.num_replicas_in_sync == 4
    assert (context.num_input_pipelines, context.input_pipeline_id) == (jax.process_count(), jax.process_index())
    size = context.get_per_replica_batch_size(BATCH_SIZE)
    slices = [(start, min(start + size, len(X))) for start in range(0, len(X), size)]
    local = 4 // context.num_input_pipelines
    return Batches([part for number, part in enumerate(slices) if number % 4 // local == context.input_pipeline_id])


def in_loops_of_ones_own(strategy, model, state):
    """Returns what loops of one's own give under a strategy of four replicas, by the way in which they get data."""
    distributed = {name: strategy.experimental_distribute_dataset(FEEDS[name]()) for name in (
        "dataset, auto", "iterable, off, odd", "iterable, off, one process ends first", "grain")}
    distributed["from function"] = strategy.distribute_datasets_from_function(dealt)
    results = {name: train_by_hand(strategy, model, state, lambda data=data: itertools.chain(data, data))
               for name, data in distributed.items()}
    endless = strategy.experimental_distribute_dataset(FEEDS["dataset, auto"]().repeat())
    results["endless"] = train_by_hand(strategy, model, state, lambda: itertools.islice(endless, 8))
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group))
    results["values"] = strategy.gather(strategy.run(lambda value: value[None], args=(values,)))
    results["sums"] = [float(strategy.reduce("sum", value)) for value in (values, 2.0)]
    return results


def with_nnx(strategy):
    """Returns the weights and losses of a loop that updates NNX objects in place."""
    net = NNXMLP()
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    def step(net, optimizer, inputs):
        x, y = inputs
        replica = distribute.get_replica_context()

        def loss_fn(net):
            losses = optax.softmax_cross_entropy_with_integer_labels(net(x), y)
            return (losses * replica.row_mask).sum() / BATCH_SIZE

        loss, grads = nnx.value_and_grad(loss_fn)(net)
        optimizer.update(net, replica.all_reduce("sum", grads))
        return loss

    losses = [float(strategy.reduce("sum", strategy.run(step, args=(net, optimizer, inputs))))
              for inputs in strategy.experimental_distribute_dataset(FEEDS["dataset, auto"]())]
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(net, nnx.Param))]


def cluster():
    return LocalCluster(2, devices_per_worker=2, timeout_secs=240)


def every_loop():
    strategy = distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = new_model()
    return {**in_loops_of_ones_own(strategy, model, model.state), "nnx": with_nnx(strategy)}


def every_feed():
    with distribute.MultiWorkerMirroredStrategy().scope():
        model = new_model()
    state = model.state
    return {name: fitted(model, state, feed) for name, feed in FEEDS.items()}


def assert_alike(received, expected, name):
    assert jax.tree.structure(received) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


def test_every_way_to_share_data_gives_the_numbers_of_one_process():
    results = cluster().run(every_feed)
    with mirrored(4).scope():
        model = new_model()
    state = model.state
    for name, feed in FEEDS.items():
        expected = fitted(model, state, feed)
        assert len(expected["predictions"]) == len(X)
        for result in results:
            assert_alike(result[name], expected, name)


def test_loops_of_ones_own_give_the_numbers_of_one_process():
    results = cluster().run(every_loop)
    strategy = mirrored(4)
    with strategy.scope():
        model = new_model()
    expected = {**in_loops_of_ones_own(strategy, model, model.state), "nnx": with_nnx(strategy)}
    np.testing.assert_array_equal(expected["from function"]["rows"], expected["dataset, auto"]["rows"])
    assert sorted(expected["values"]) == [0, 1, 2, 3]
    for result in results:
        for name, numbers in expected.items():
            assert_alike(result[name], numbers, name)


class Stopped(Exception):
    """Stands for the end of a process, in all of them at once."""


class StopAt(cb.Callback):
    """Notes how many batches a run begins with, and ends it once it has saved after a number of them."""

    def __init__(self, batches=None):
        self.begun, self.batches = None, batches

    def on_save_point(self, point):
        if point.kind == "start":
            self.begun = point.batches
        elif point.batches == self.batches:
            point.wait()
            raise Stopped


def own_grain_rows():
    """Batches that each process makes from rows of its own."""
    rows = grain.MapDataset.range(jax.process_index(), len(X), jax.process_count()).shuffle(seed=3)
    return with_options(rows.map(lambda row: (X[row], Y[row])).batch(4).to_iter_dataset(READ_AHEAD), "off")


def resumed(model, state, data, folder, stop):
    """Returns the weights of a training that was stopped after some batches and resumed; undisturbed for none."""
    for stops in ([StopAt(stop)] if stop else []) + [StopAt()]:
        model.state = state
        try:
            model.fit(data(), epochs=2, verbose=0, callbacks=[cb.BackupAndRestore(folder, 3), stops])
        except Stopped:
            continue
        assert stops.begun == stop
        return model.get_weights()


def loads_of_grain(model, data):
    """Returns which rows a process loads when all are predicted, but for the first batch that is looked at whole."""
    loaded = []
    rows = model.predict(data(loaded), verbose=0)
    assert len(rows) == len(X)
    first = [int(row) for row in grain.MapDataset.range(len(X)).shuffle(seed=3)[:BATCH_SIZE]]
    for row in first:
        loaded.remove(row)
    return sorted(loaded)


class Failing(Batches):
    """Fails at its third batch, in process 1."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 2 and jax.process_index() == 1:
                raise OSError("no such file")
            yield batch


def refusal(call):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


RESUMED = [("grain", grain_batches, (3, 9)), ("rows of an iterator", grain_batches_of_iterator, (9,)),
           ("own grain", own_grain_rows, (9,)), ("odd", FEEDS["iterable, off, odd"], (9,))]


def resuming_and_refusals(folder):
    with distribute.MultiWorkerMirroredStrategy().scope():
        model = new_model()
    state, weights = model.state, {}
    for name, data, stops in RESUMED:
        for stop in (0, *stops):
            path = os.path.join(folder, f"{name} {stop}")
            weights[f"{name} {stop}"] = resumed(model, state, data, path, stop)
    missing = Batches(WHOLE[:2] if jax.process_index() == 0 else [])
    endless = iter(itertools.cycle([(X[:3], Y[:3])] if jax.process_index() else [(X[:2], Y[:2])]))
    history = model.fit(with_options(endless, "off"), epochs=2, steps_per_epoch=3, verbose=0,
                        callbacks=[cb.LambdaCallback(on_epoch_end=stop_first(model))])
    return {
        "loads": [loads_of_grain(model, data) for data in (grain_batches, grain_batches_of_iterator)],
        "weights": weights, "epochs": len(history.history["loss"]),
        "failing": refusal(lambda: model.predict(with_options(Failing(WHOLE), "off"), verbose=0)),
        "missing": refusal(lambda: model.predict(with_options(missing, "off"), verbose=0)),
        "mixed": refusal(lambda: model.predict(with_options(
            Batches(WHOLE) if jax.process_index() else iter(Batches(WHOLE)), "off"), verbose=0)),
        "ends early": refusal(lambda: model.predict(iter([X[:8]] * (2 if jax.process_index() else 4)), verbose=0)),
    }


def chief_alone():
    """Returns what the chief reads alone, on a device of its own, while a strategy over both processes exists."""
    together = distribute.MultiWorkerMirroredStrategy()
    with distribute.OneDeviceStrategy(jax.local_devices()[0]).scope() as alone:
        model = new_model()
    if not together.is_chief:
        return None
    return {
        "logs": model.evaluate(grain_batches(), verbose=0),
        "predictions": [model.predict(data, verbose=0) for data in (
            grain_batches(), with_options(grain_batches(), "data"), with_options(grain_batches(), "off"))],
        "batches": len(list(alone.experimental_distribute_dataset(grain_batches()))),
    }


def test_the_chief_alone_reads_whole_batches_for_a_strategy_of_its_own():
    chief, _ = cluster().run(chief_alone)
    with mirrored(1).scope():
        model = new_model()
    assert_alike(chief["logs"], model.evaluate(grain_batches(), verbose=0), "logs")
    for predictions in chief["predictions"]:
        assert_alike(predictions, model.predict(grain_batches(), verbose=0), "predictions")
    assert chief["batches"] == len(WHOLE)


def stop_first(model):
    def on_epoch_end(epoch, logs):
        model.stop_training = True

    return on_epoch_end


def test_data_over_processes_resume_and_are_refused_in_all_processes_alike(tmp_path):
    chief, other = cluster().run(resuming_and_refusals, str(tmp_path))
    order = [int(row) for row in grain.MapDataset.range(len(X)).shuffle(seed=3)]
    halves = [sorted(row for place, row in enumerate(order) if place % BATCH_SIZE // 4 == process)
              for process in range(2)]
    assert [chief["loads"], other["loads"]] == [[half, half] for half in halves]
    for result in (chief, other):
        for name, _, stops in RESUMED:
            for stop in stops:
                for ours, theirs in zip(result["weights"][f"{name} {stop}"], result["weights"][f"{name} 0"],
                                        strict=True):
                    np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} {stop}")
        assert result["epochs"] == 1
        assert "OSError" in result["failing"] and "no such file" in result["failing"]
        assert "Process 1 has no batch at all" in result["missing"]
        assert "must be of one kind" in result["mixed"]
        assert "next batches: 0 to 3 (8 rows each) in worker 0, 0 to 1 (8 rows each) in" in result["ends early"]
    assert "The data of process 1 failed" in chief["failing"]


@pytest.mark.every_case
@pytest.mark.parametrize(("build", "is_sharded"), [
    (lambda rows: rows.batch(8), True),
    (lambda rows: rows.batch(8, drop_remainder=True), True),
    (lambda rows: rows.batch(8).to_iter_dataset(READ_AHEAD), True),
    (lambda rows: rows.to_iter_dataset().batch(8), True),
    (lambda rows: rows.to_iter_dataset(READ_AHEAD).batch(8, drop_remainder=True), True),
    (lambda rows: rows.repeat(2).batch(8), True),
    (lambda rows: rows.batch(46), True),
    (lambda rows: rows.slice(slice(0, 1)).batch(8), True),
    (lambda rows: rows.batch(8).map(lambda batch: batch), False),
    (lambda rows: rows.batch(8, batch_fn=lambda rows: tuple(map(np.stack, zip(*rows, strict=True)))), False),
    (lambda rows: rows.filter(lambda row: True).to_iter_dataset().batch(8), False),
    (lambda rows: rows.to_iter_dataset().batch(8).map(lambda batch: batch), False),
], ids=range(12))
def test_two_processes_read_the_rows_and_states_of_one_from_grain(build, is_sharded):
    sources = [adapt(build(grain_rows()), processes=processes)
               for processes in (Processes(0, 2, 2), Processes(1, 2, 2), Processes())]
    assert sources[0].pipeline == sources[1].pipeline == sources[2].pipeline
    for *halves, whole in zip(*(source.read(0) for source in sources), strict=True):
        states = [source.state() for source in sources]
        assert states[0] == states[1] == states[2] is not None
        assert [isinstance(half, LocalRows) for half in halves] == [is_sharded] * 2
        for place, leaf in enumerate(whole):
            if is_sharded:
                assert [half.counts for half in halves] == [tuple(len(half.data[place]) for half in halves)] * 2
                np.testing.assert_array_equal(np.concatenate([half.data[place] for half in halves]), leaf)
            for half in halves:
                np.testing.assert_array_equal(half.whole()[place] if is_sharded else half[place], leaf)


def test_a_policy_is_given_once_by_its_name_to_data_that_yield_batches():
    assert next(iter(with_options(Batches(WHOLE), "Off")))[0].shape == (BATCH_SIZE, 6)
    with pytest.raises(ValueError, match=r"Unknown auto_shard_policy 'file'. Known names: auto, data, off"):
        with_options(Batches(WHOLE), "file")
    with pytest.raises(ValueError, match=r"have the policy AutoShardPolicy\.DATA already"):
        with_options(with_options(Batches(WHOLE), "data"), "off")
    with pytest.raises(ValueError, match=r"must yield batches\. Received: arrays"):
        with_options((X, Y), "off")
