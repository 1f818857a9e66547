"""`fit(max_steps=, max_time=, limit_batches=)`: where a run ends before its last epoch, and how it goes on."""

from __future__ import annotations

import datetime
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import classification, logits_loss
from trainer import callbacks as cb
from trainer import distribute
from trainer.data import Dataset
from trainer.engine.loop import resumable_run
from trainer.testing import LocalCluster

X, Y, _ = classification(52)  # 7 batches of 8 rows, the last one of 4
VALIDATION = X[:20], Y[:20]


def make_model():
    model = trainer.Model(nn.Sequential([nn.Dense(8), nn.Dropout(0.2), nn.Dense(3)]), seed=3)
    model.compile(trainer.optimizers.Adam(0.02), logits_loss(), metrics=["accuracy"])
    return model


def fit(*callbacks, data=(X, Y), model=None, epochs=3, **options):
    """Returns the model and the history after a fit."""
    model = model or make_model()
    options = {"batch_size": 8, "validation_data": VALIDATION, "verbose": 0} | options
    history = model.fit(*data, epochs=epochs, callbacks=list(callbacks), **options)
    return model, history.history


class Batches(cb.Callback):
    """Notes the last batch of each execution."""

    def __init__(self):
        self.seen = {"train": [], "test": []}

    def on_execution_end(self, phase, batch, logs=None):
        self.seen[phase].append(batch)


class Clock:
    """A clock that goes a second further each time it is read."""

    now = 0.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self):
        self.now += 1.0
        return self.now


def same(one, other):
    assert one[1] == other[1]
    for a, b in zip(one[0].get_weights(), other[0].get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def unlimited():
    return fit()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (7, 1), (10, 2), (100, 3)])
def test_a_run_ends_after_so_many_steps(steps, epochs, unlimited):
    model, history = fit(max_steps=steps)
    assert int(model.state.step) == min(steps, 21)
    assert [len(values) for values in history.values()] == [epochs] * len(history)
    whole = min(steps // 7, 3)
    assert {name: values[:whole] for name, values in history.items()} == {
        name: values[:whole] for name, values in unlimited[1].items()}


@pytest.mark.slow
def test_a_run_that_goes_step_by_step_ends_there_too():
    batches = Batches()
    fit(batches, cb.LambdaCallback(on_train_batch_end=lambda batch, logs: None), max_steps=3)
    assert batches.seen["train"] == [0, 1, 2]


@pytest.mark.slow
def test_the_steps_of_an_earlier_fit_do_not_count():
    model = make_model()
    fit(model=model, max_steps=5)
    fit(model=model, max_steps=5)
    assert int(model.state.step) == 10


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "save_freq"), [(5, "epoch"), (7, 4)])
def test_a_run_that_ended_at_its_steps_goes_on_exactly(tmp_path, unlimited, steps, save_freq):
    def backup():
        return cb.BackupAndRestore(tmp_path, save_freq)

    fit(backup(), max_steps=steps)
    model, _ = fit(backup(), max_steps=steps)  # is there already
    assert int(model.state.step) == steps
    fit(backup(), max_steps=steps + 1)
    same(fit(backup()), unlimited)
    assert not tmp_path.exists()


@pytest.mark.slow
def test_callbacks_see_the_rest_of_an_epoch_as_if_it_had_not_ended_before(tmp_path):
    def logged(name, **options):
        for limits in options.pop("parts", [{}]):
            fit(cb.BackupAndRestore(tmp_path / "backup"), cb.CSVLogger(tmp_path / name), cb.ReduceLROnPlateau(
                "val_loss", patience=0, min_delta=1.0), cb.EarlyStopping("loss", patience=2), **limits)
        return (tmp_path / name).read_text()

    assert logged("parts.csv", parts=[{"max_steps": 3}, {"max_steps": 7}, {}]) == logged("whole.csv")


@pytest.mark.slow
def test_a_run_ends_after_some_time(monkeypatch, tmp_path, unlimited):
    monkeypatch.setattr(resumable_run, "time", Clock())
    single_steps = cb.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    model, history = fit(cb.BackupAndRestore(tmp_path), single_steps, max_time=4)
    assert (int(model.state.step), len(history["loss"])) == (4, 1)
    # The next call has as much time again.
    model, _ = fit(cb.BackupAndRestore(tmp_path), single_steps, max_time=datetime.timedelta(seconds=5))
    assert int(model.state.step) == 8
    same(fit(cb.BackupAndRestore(tmp_path), single_steps), unlimited)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["preempted", "failed"])
def test_what_comes_after_the_limit_does_not_replace_what_was_saved_there(tmp_path, unlimited, stopped):
    backup = cb.BackupAndRestore(tmp_path, save_on_error=True)

    def end(logs):
        if stopped == "failed":
            raise OverflowError
        backup._is_preempted = True

    with pytest.raises(OverflowError if stopped == "failed" else SystemExit):
        fit(backup, cb.LambdaCallback(on_test_begin=end), max_steps=5)
    same(fit(cb.BackupAndRestore(tmp_path)), unlimited)


def batches_of(count):
    return [(X[8 * number:8 * number + 8], Y[8 * number:8 * number + 8]) for number in range(count)]


class Iterable:
    def __iter__(self):
        return iter(batches_of(6))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options"), [
    (lambda: (X, Y), {}),
    (lambda: (X, Y), {"steps_per_epoch": 4}),
    (lambda: (Dataset.from_arrays((X, Y)).shuffle().batch(8),), {"batch_size": None}),
    (lambda: (Dataset.from_arrays((X, Y)).batch(8).repeat(),), {"batch_size": None}),
    (lambda: (iter(batches_of(6)),), {"batch_size": None}),
    (lambda: (Iterable(),), {"batch_size": None}),
], ids=["arrays", "steps_per_epoch", "dataset", "endless", "generator", "iterable"])
def test_a_dry_run_takes_so_many_batches_of_each_epoch_and_validation(make, options):
    batches = Batches()
    one_by_one = cb.LambdaCallback(on_train_batch_end=lambda *_, **__: None, on_test_batch_end=lambda *_, **__: None)
    model, history = fit(
        batches, one_by_one, data=make(), epochs=2, limit_batches=2, validation_batch_size=8, **options)
    assert batches.seen == {"train": [0, 1, 0, 1], "test": [0, 1, 0, 1]}
    assert int(model.state.step) == 4
    assert len(history["val_loss"]) == 2


@pytest.mark.slow
def test_each_epoch_of_a_dry_run_begins_with_the_first_batches():
    seen = []

    class Noting(trainer.Model):
        def train_step(self, state, batch):
            seen.append(np.asarray(batch[0]).tolist())
            return super().train_step(state, batch)

    model = Noting(nn.Dense(3))
    model.compile("sgd", logits_loss(), run_eagerly=True)
    model.fit(Iterable(), epochs=2, limit_batches=2, verbose=0)
    batches = [x.tolist() for x, _ in batches_of(2)]
    assert [x for x in seen if x in batches][-4:] == batches * 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: (X, Y), lambda: (Iterable(),), lambda: (batches_of(6),)])
def test_a_dry_run_leaves_the_checkpoint_of_another_run_alone(tmp_path, make):
    data = make()
    options = {"data": data, "batch_size": 8 if data[0] is X else None, "validation_data": None}

    def interrupt(batch, logs=None):
        if batch == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(cb.BackupAndRestore(tmp_path, save_freq=2), cb.LambdaCallback(on_train_batch_end=interrupt), **options)
    differs = r"limit_batches \(received 2, in the checkpoint None\)|batches of an epoch \(received 2"
    with pytest.raises(ValueError, match=differs):
        fit(cb.BackupAndRestore(tmp_path), limit_batches=2, **options)
    same(fit(cb.BackupAndRestore(tmp_path), **options), fit(**options))


@pytest.mark.slow
def test_a_limit_that_is_no_limit_changes_nothing(unlimited):
    same(fit(limit_batches=100, max_steps=100, max_time=1e6), unlimited)


def fit_with_own_clock(folder):
    """Trains in one of several processes, whose clocks differ, and goes on; returns the steps of both."""
    strategy = distribute.MultiWorkerMirroredStrategy()
    standing = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    resumable_run.time = Clock() if jax.process_index() else standing
    steps = []
    for options in ({"max_time": 4}, {}):
        with strategy.scope():
            model = trainer.Model(nn.Dense(3), seed=3)
            model.compile("sgd", logits_loss(), steps_per_execution=1)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[cb.BackupAndRestore(folder)], **options)
        steps.append(int(model.state.step))
    return steps, float(np.sum(model.get_weights()[1]))


@pytest.mark.processes
def test_several_processes_end_after_the_same_batch(tmp_path):
    one, other = LocalCluster(2, timeout_secs=240).run(fit_with_own_clock, str(tmp_path / "backup"))
    assert one == other
    assert one[0] == [4, 14]
