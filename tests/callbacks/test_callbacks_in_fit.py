"""The callbacks at work in a real fit; their decisions alone are tested elsewhere."""

from __future__ import annotations

import contextlib
import csv
import re
import threading
import time

import numpy as np
import pytest

import trainer
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer import callbacks as cb
from trainer.engine.loop import loop, running_phase


@pytest.fixture(autouse=True, params=["auto", pytest.param(1, marks=pytest.mark.slow), 3],
                ids=lambda steps: f"{steps}_steps")
def fusing(request, monkeypatch):
    """How many steps every model of these tests fuses: as many as the trainer likes, none, and so many."""
    monkeypatch.setitem(globals(), "STEPS_PER_EXECUTION", request.param)


STEPS_PER_EXECUTION = "auto"


def make_model(optimizer="sgd"):
    with mirrored(2).scope():
        model = trainer.Model(LinenMLP(), seed=1)
        model.compile(optimizer, logits_loss(), metrics=["accuracy"], steps_per_execution=STEPS_PER_EXECUTION)
    return model


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights():
    x, y, _ = classification(32)
    seen = []
    model = make_model(trainer.optimizers.SGD(learning_rate=0.05))

    class Worsens(cb.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((logs["val_loss"], self.model.get_weights()))
            if epoch == 1:
                self.model.optimizer.learning_rate = 50.0

    stopper = cb.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    history = model.fit(x, y, epochs=20, validation_data=(x, y), callbacks=[Worsens(), stopper], verbose=0)
    assert len(history.epoch) < 20
    losses = [loss for loss, _ in seen]
    best = int(np.argmin(losses))
    assert stopper.best == losses[best]
    for ours, theirs in zip(model.get_weights(), seen[best][1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.every_case
def test_predict_gives_callbacks_the_outputs_of_each_batch():
    x, _, _ = classification(21)
    seen = []
    watcher = cb.LambdaCallback(on_predict_batch_end=lambda batch, logs: seen.append(logs["outputs"]))
    outputs = make_model().predict(x, batch_size=8, callbacks=[watcher], verbose=0)
    assert [len(part) for part in seen] == [8, 8, 5]
    np.testing.assert_array_equal(np.concatenate(seen), outputs)


@pytest.mark.slow
@pytest.mark.every_case
def test_terminate_on_nan_stops_in_the_epoch_of_the_batch(capsys):
    x, y, _ = classification(32)
    x[17] = np.nan
    model = make_model()
    model.fit(x, y, batch_size=8, epochs=5, shuffle=False, callbacks=[cb.TerminateOnNaN()], verbose=0)
    assert int(model.state.step) == 4
    assert re.match("Batch [23]: Invalid loss, terminating training", capsys.readouterr().out)


@pytest.mark.slow
def test_a_schedule_by_epoch_and_a_plateau_change_the_rate_and_log_it():
    x, y, _ = classification(16)
    model = make_model(trainer.optimizers.SGD(learning_rate=0.5))
    scheduler = cb.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    history = model.fit(x, y, epochs=3, callbacks=[scheduler], verbose=0).history
    np.testing.assert_allclose(history["learning_rate"], [0.25, 0.125, 0.0625])
    plateau = cb.ReduceLROnPlateau(monitor="loss", factor=0.1, patience=1, min_delta=100.0)
    model.fit(x, y, epochs=3, callbacks=[plateau], verbose=0)
    assert float(model.optimizer.learning_rate) < 0.0625


@pytest.fixture
def events(monkeypatch):
    """What a fit does, in its order: "run" for an execution, "fetch" for the logs of an epoch."""
    found, execute, on_host = [], loop._execute, running_phase.on_host
    monkeypatch.setattr(loop, "_execute", lambda *args: (found.append("run"), execute(*args))[1])
    monkeypatch.setattr(running_phase, "on_host", lambda values: (found.append("fetch"), on_host(values))[1])
    return found


@pytest.mark.slow
def test_the_device_has_the_next_epoch_before_logs_are_fetched(events):
    x, y, _ = classification(8)
    model = make_model()
    late = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history["loss"]
    assert events == ["run", "run", "fetch", "run", "fetch", "fetch"]
    assert len(late) == 3
    events.clear()
    model = make_model()
    read = []
    reads = cb.LambdaCallback(on_epoch_end=lambda epoch, logs: read.append(model.history.history["loss"][-1]))
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[cb.History(), reads])
    assert history.history["loss"] == late
    assert read == late
    assert events == ["run", "fetch"] * 3


@pytest.mark.slow
@pytest.mark.every_case
def test_few_executions_are_queued_however_many_epochs_there_are(monkeypatch):
    queued, run_epoch = [], loop._run_epoch

    def observed(phase, *args, **options):
        queued.append(len(phase.in_flight))
        return run_epoch(phase, *args, **options)

    monkeypatch.setattr(loop, "_run_epoch", observed)
    x, y, _ = classification(8)
    make_model().fit(x, y, batch_size=8, epochs=20, verbose=0)
    assert queued == [0, 1, *[loop.MAX_IN_FLIGHT] * 18]


@pytest.mark.slow
@pytest.mark.every_case
def test_an_interrupted_fetch_loses_no_epoch(monkeypatch):
    def interrupted(values):
        monkeypatch.undo()
        raise KeyboardInterrupt

    x, y, _ = classification(8)
    model = make_model()
    monkeypatch.setattr(running_phase, "on_host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert model.history.epoch == [0]
    assert len(model.history.history["loss"]) == 1


@pytest.mark.slow
@pytest.mark.every_case
def test_a_csv_file_has_the_history(tmp_path):
    x, y, _ = classification(16)
    path = tmp_path / "log.csv"
    history = make_model().fit(x, y, epochs=2, callbacks=[cb.CSVLogger(str(path))], verbose=0).history
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == [str(value) for value in history["loss"]]


@pytest.mark.slow
def test_a_line_is_printed_per_epoch_where_there_is_no_terminal(capsys):
    x, y, _ = classification(16)
    make_model().fit(x, y, epochs=2, validation_data=(x, y))
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Epoch 1/2")
    assert lines[2].startswith("Trained in ")
    assert all(name in lines[1] for name in ("loss", "accuracy", "val_loss", "val_accuracy"))


@pytest.mark.slow
def test_verbose_0_prints_nothing(capsys):
    x, y, _ = classification(16)
    model = make_model()
    model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    captured = capsys.readouterr()
    assert not captured.out
    assert not captured.err


@pytest.mark.slow
def test_hooks_are_called_in_keras_order():
    calls = []
    hooks = {name: lambda *args, _name=name, **kwargs: calls.append(_name) for name in dir(cb.Callback)
             if name.startswith("on_") and name not in (
                 "on_batch_begin", "on_batch_end", "on_execution_end", "on_save_point")}
    recorder = cb.Callback()
    for name, hook in hooks.items():
        setattr(recorder, name, hook)
    x, y, _ = classification(8)
    model = make_model()
    model.fit(x, y, batch_size=8, validation_data=(x, y), callbacks=[recorder], verbose=0)
    assert calls == [
        "on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
        "on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end", "on_epoch_end", "on_train_end"]
    calls.clear()
    model.predict(x, callbacks=[recorder], verbose=0)
    assert calls == ["on_predict_begin", "on_predict_batch_begin", "on_predict_batch_end", "on_predict_end"]


@pytest.mark.slow
def test_a_callback_that_raises_leaves_no_thread_and_a_model_that_goes_on():
    x, y, _ = classification(64)
    model = make_model()

    def fail(batch, logs):
        raise RuntimeError("from a callback")

    with pytest.raises(RuntimeError, match="from a callback"):
        model.fit(x, y, batch_size=8, callbacks=[cb.LambdaCallback(on_train_batch_end=fail)], verbose=0)
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop_training", "an exception"])
def test_a_run_that_ends_early_leaves_a_slow_generator_to_its_owner(how):
    x, y, _ = classification(8)
    model = make_model()
    model.fit(x, y, batch_size=8, verbose=0)
    count = 0

    def batches():
        nonlocal count
        while True:
            time.sleep(0.05)
            count += 1
            yield x, y

    def end(batch, logs):
        if how == "an exception":
            raise RuntimeError("from a callback")
        model.stop_training = True

    generator = batches()
    with contextlib.suppress(RuntimeError):
        model.fit(generator, steps_per_epoch=300, verbose=0, callbacks=[cb.LambdaCallback(on_train_batch_end=end)])
    assert not [thread for thread in threading.enumerate() if thread.name == "trainer-prefetch"]
    assert count < 100, "it is not read until a group of 256 is full"
    model.fit(generator, steps_per_epoch=2, verbose=0)
    generator.close()


@pytest.mark.slow
@pytest.mark.every_case
def test_predict_ends_with_the_batch_at_which_a_callback_stops_it():
    class Stops(trainer.callbacks.Callback):
        def __init__(self):
            self.seen = []

        def on_predict_batch_end(self, batch, logs=None):
            self.seen.append(batch)
            self.model.stop_predicting = batch == 2

    x, _, _ = classification(40)
    model = make_model()
    whole = model.predict(x, batch_size=8, verbose=0)
    stops = Stops()
    np.testing.assert_array_equal(model.predict(x, batch_size=8, callbacks=[stops], verbose=0), whole[:24])
    assert stops.seen == [0, 1, 2]


@pytest.mark.slow
def test_executions_end_where_a_callback_looks_and_nothing_else_changes():
    class Looks(trainer.callbacks.Callback):
        def __init__(self, batches):
            self.batches, self.seen = batches, []

        def next_sync_step(self, phase, batch):
            return next((look for look in self.batches if look >= batch), None) if phase == "train" else None

        def on_execution_end(self, phase, batch, logs=None):
            if phase == "train":
                self.seen.append((batch, round(logs["loss"], 5)))

    x, y, _ = classification(88)
    every, some, none = Looks(range(11)), Looks([2, 3, 8]), Looks([])
    weights = []
    for callbacks, data in (([every], (x, y)), ([some, none], (x, y)), ([some], None)):
        model = make_model()
        batches = trainer.data.Dataset.from_arrays((x, y)).batch(8)
        arguments = data or (batches.map(lambda x, y: (x, y)),)
        model.fit(*arguments, batch_size=8 if data else None, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    ends = {"auto": [2, 3, 8, 10], 3: [2, 3, 5, 8, 10], 1: list(range(11))}[STEPS_PER_EXECUTION]
    assert [batch for batch, _ in some.seen] == ends * 2
    assert set(some.seen) <= set(every.seen)
    assert none.seen == some.seen[:len(ends)]
    for other in weights[1:]:
        for mine, theirs in zip(weights[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("look", "error"), [
    (-1, ValueError), (0, ValueError), (True, TypeError), (1.5, TypeError), ("1", TypeError)])
def test_a_look_that_is_no_later_batch_is_refused(look, error):
    class Looks(trainer.callbacks.Callback):
        def next_sync_step(self, phase, batch):
            return look

    x, y, _ = classification(32)
    with pytest.raises(error, match=r"`Looks.next_sync_step` must be the number of a batch, \d or a later one"):
        make_model().fit(x, y, batch_size=8, callbacks=[Looks()], verbose=0)
