"""Batches of several lengths or sizes: a program for each shape, and the numbers of steps batch by batch."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored
from trainer.data.adapt import adapt
from trainer.data.reader import Reader

LENGTHS = (6, 4, 4, 6, 3)
rng = np.random.default_rng(0)
BATCHES = [(rng.integers(1, 20, (rows, length)), rng.integers(1, 5, (rows, length)))
           for rows, length in zip((8, 8, 8, 8, 4), LENGTHS, strict=True)]


def made(replicas=1, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(nn.Sequential([nn.Embed(20, 4), nn.Dense(5)]), seed=1)
        options = {"compile_guard": "off", **options}
        model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def unlike(batches):
    """A generator that writes each batch of a length to the same memory, as some pipelines do."""
    memory = {}
    for batch in batches:
        kept = memory.setdefault(batch[0].shape, jax.tree.map(np.empty_like, batch))
        jax.tree.map(lambda to, part: to.__setitem__(slice(None), part), kept, batch)
        yield kept


@pytest.fixture(scope="module")
def step_by_step():
    """The weights after `train_on_batch` on each batch, and the logs of each batch by the final weights."""
    model = made()
    for batch in BATCHES:
        model.train_on_batch(*batch)
    return model.get_weights(), [model.test_on_batch(*batch) for batch in BATCHES]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("replicas", "steps"), [(2, 2), (1, 1), (1, 3)])
def test_fit_and_evaluate_give_the_numbers_of_single_batches(step_by_step, replicas, steps):
    model = made(replicas, steps_per_execution=steps)
    model.fit(unlike(BATCHES), verbose=0)
    weights, losses = step_by_step
    for mine, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    mean = np.average(losses, weights=[len(x) for x, _ in BATCHES])
    assert model.evaluate(BATCHES, verbose=0)["loss"] == pytest.approx(mean, rel=1e-5)


def test_predictions_of_several_lengths_come_batch_by_batch():
    model = made()
    model.build(BATCHES[0][0])
    parts = list(model.predict_iter(BATCHES))
    assert [part.shape for part in parts] == [(*x.shape, 5) for x, _ in BATCHES]
    np.testing.assert_allclose(parts[1], model.predict_on_batch(BATCHES[1][0]), rtol=1e-6)
    with pytest.raises(ValueError, match=r"rows of shape \(6, 5\), and of shape \(4, 5\) for batch 1.*predict_iter"):
        model.predict(BATCHES, verbose=0)


@pytest.mark.slow
def test_outputs_of_one_length_are_one_array():
    model = trainer.Sequential([nn.Embed(20, 4), lambda rows: rows.mean(1)])
    model.build(BATCHES[0][0])
    model.compile(compile_guard="off")
    outputs = model.predict(BATCHES, verbose=0)
    np.testing.assert_allclose(outputs[8:16], model(BATCHES[1][0]), rtol=1e-6)


@pytest.mark.slow
def test_a_run_resumes_between_batches_of_several_lengths(tmp_path, step_by_step):
    class Stops(Exception):
        pass

    def stop(batch, logs):
        if batch == 2:
            raise Stops

    for interrupts in ([trainer.callbacks.LambdaCallback(on_train_batch_end=stop)], []):
        model = made(steps_per_execution=1)
        saves = trainer.callbacks.BackupAndRestore(tmp_path, save_freq=1)
        try:
            model.fit(BATCHES, verbose=0, callbacks=[saves, *interrupts])
        except Stops:
            assert interrupts
    for mine, theirs in zip(model.get_weights(), step_by_step[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_guard_reports_each_new_length():
    with pytest.raises(RuntimeError, match=r"`x` was int32 \(8, 6\) and is int32 \(8, 4\).*pad them to few lengths"):
        made(compile_guard="error").evaluate(BATCHES, verbose=0)


@pytest.mark.slow
def test_a_size_that_the_module_cannot_take_is_refused_by_batch():
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse", compile_guard="off")
    with pytest.raises(ValueError, match=r"batch 1: `x` was float32 \(8, 4\) and is float32 \(8, 3\), which the train"):
        model.fit([(x, y), (x[:, :3], y)], verbose=0)


def test_a_stack_of_large_batches_takes_no_more_memory_than_that_of_the_first(monkeypatch):
    monkeypatch.setattr("trainer.data.reader._LEAST_STACK_BYTES", 0)
    batches = [np.zeros((2, length), np.float32) for length in (10, 10, 40, 40, 40, 400, 5)]
    groups = list(Reader(adapt(iter(batches)), group_size=8).read(0))
    assert [group.count for group in groups] == [2, 2, 1, 1, 1]
    assert [group.data.shape[0] for group in groups] == [8, 2, 2, 2, 8]
