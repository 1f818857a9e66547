"""Where the time of a run went: what is measured adds up, and is found where it was spent."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

import trainer
from tests.loop.test_compilation import count_compilations
from tests.support.clock import StandingClock
from tests.support.networks import classification, compiled_mlp
from trainer.core import timing


@pytest.fixture
def clock(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_nested_time_counts_once_and_the_rest_is_the_hosts(clock):
    watch = timing.Timing()
    watch.rows = 50
    clock.now += 1
    with watch.callbacks:
        clock.now += 2
        with watch.device:
            clock.now += 4
        clock.now += 8
    with contextlib.suppress(KeyError), watch.compile:
        clock.now += 16
        raise KeyError
    watch.end()
    clock.now += 100
    assert watch.report() == {"data": 0, "compile": 16, "device": 4, "callbacks": 10, "checkpoint": 0, "host": 1,
                              "total": 31, "rows_per_sec": 50 / 15}


def test_a_run_tells_its_progress_until_it_ends(clock, monkeypatch):
    told = []
    monkeypatch.setattr(timing, "_progress", None)
    timing.set_progress(lambda steps, activity: told.append((steps, activity)))
    watch = timing.Timing()
    with watch.data:  # not yet a run
        watch.begin_steps(1)
    watch.begin_progress()
    with watch.data:
        watch.begin_steps(2)
    watch.end()
    with watch.compile:
        watch.begin_steps(4)
    assert told == [(1, "host"), (1, "data"), (3, "data"), (3, "host"), (3, "idle")]


def run(callbacks=None, slow_data=0.0, **options):
    x, y, _ = classification(32)

    class Batches:
        def __iter__(self):
            for start in range(0, 32, 8):
                time.sleep(slow_data)
                yield x[start:start + 8], y[start:start + 8]

    model = compiled_mlp()
    return model, model.fit(Batches(), epochs=2, verbose=0, callbacks=callbacks, **options).timing


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_run_counts_each_batch_of_an_execution(call):
    x, y, _ = classification(32)
    model = compiled_mlp(steps_per_execution=3)
    getattr(model, call)(x, *[y] * (call != "predict"), batch_size=8, verbose=0)
    assert model.current_run.timing.steps == 4


@pytest.mark.slow
def test_a_slow_pipeline_shows_as_data_a_slow_callback_as_callbacks_and_the_parts_add_up():
    slow = trainer.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.15))
    _, secs = run([slow], slow_data=0.05)
    assert secs["data"] >= 0.05  # the first batch; others may be ready when a step has ended
    assert secs["callbacks"] >= 0.3
    assert secs["compile"] > 0
    assert secs["checkpoint"] == 0
    parts = sum(value for name, value in secs.items() if name not in ("total", "rows_per_sec"))
    np.testing.assert_allclose(parts, secs["total"], rtol=1e-6)
    np.testing.assert_allclose(secs["rows_per_sec"], 64 / (secs["total"] - secs["compile"]), rtol=1e-6)


@pytest.mark.slow
def test_what_was_compiled_before_is_not_compiled_again():
    model, _ = run()
    x, y, _ = classification(32)
    model.fit(x, y, batch_size=8, verbose=0)
    with count_compilations() as compiled:
        model.fit(x, y, batch_size=8, verbose=0)
    assert compiled == []


@pytest.mark.slow
def test_an_evaluation_by_a_callback_leaves_the_clock_of_fit_alone():
    x, y, _ = classification(32)
    inner = []

    def evaluate(epoch, logs):
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, verbose=0)
        inner.append(model.current_run.timing.report()["total"])

    model = compiled_mlp()
    callbacks = trainer.callbacks.LambdaCallback(on_epoch_end=evaluate)
    secs = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks).timing
    assert model.current_run.timing.report() == secs
    assert inner[0] < inner[1] < secs["total"], "after them the clock is that of fit again"
    np.testing.assert_allclose(secs["rows_per_sec"], 64 / (secs["total"] - secs["compile"]), rtol=1e-6)
    model.evaluate(x, y, batch_size=8, verbose=0)
    assert model.current_run.timing.report()["total"] < secs["total"]


@pytest.mark.slow
def test_it_is_there_when_fit_was_interrupted():
    def stop(batch, logs):
        raise KeyboardInterrupt

    model = compiled_mlp()
    x, y, _ = classification(32)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0, callbacks=trainer.callbacks.LambdaCallback(on_train_batch_end=stop))
    assert model.history.timing["compile"] > 0


def test_a_fit_by_a_callback_or_beside_a_prediction_has_its_own_history_and_clock():
    x, y, _ = classification(32)
    inner = []

    def fit(epoch, logs):
        inner.append(model.fit(x, y, batch_size=8, verbose=0))

    model = compiled_mlp()
    outer = model.fit(x, y, batch_size=8, epochs=3, verbose=0,
                      callbacks=trainer.callbacks.LambdaCallback(on_epoch_end=fit))
    assert outer.epoch == [0, 1, 2]
    assert model.history is outer
    assert all(history.epoch == [0] for history in inner)
    assert sum(history.timing["total"] for history in inner) < outer.timing["total"]
    predictions = model.predict_iter(x, batch_size=8)
    next(predictions)
    assert model.fit(x, y, batch_size=8, verbose=0).timing["rows_per_sec"] > 0
    predictions.close()
