"""Throughput divides the rows and operations of an epoch by the time of its training, and by nothing else's."""

from __future__ import annotations

import time
import types

import jax
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.clock import StandingClock
from tests.support.networks import classification, compiled_mlp, mirrored
from trainer.callbacks import Callback, CallbackList, EarlyStopping, LazyLogs
from trainer.callbacks.throughput import Throughput
from trainer.callbacks.validate_every import ValidateEvery
from trainer.core import timing as timing_module
from trainer.core.timing import Timing


class Device:
    """A device of a kind; `begin` gives a run on two of them."""

    def __init__(self, kind):
        self.device_kind = kind


@pytest.fixture
def clock(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(timing_module, "time", clock)
    return clock


def begin(callback, flops=None, kind="a device that nobody knows"):
    """Returns a callback list in a run on two devices, whose step has so many operations."""
    weight = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set={Device(kind), Device(kind)}))
    model = types.SimpleNamespace(current_run=types.SimpleNamespace(
        timing=Timing(), train_step_flops=lambda: flops, state=types.SimpleNamespace(params=[weight])))
    callbacks = CallbackList([callback], model=model, verbose=0)
    callbacks.on_train_begin()
    return callbacks


def execute(callbacks, clock, last, rows, secs=0.0):
    """Spends some seconds on an execution that ends with a batch."""
    callbacks.next_sync_step("train", 0)
    clock.now += secs
    callbacks.model.current_run.timing.rows += rows
    callbacks.on_execution_end("train", last, {})


def end_epoch(callbacks, epoch=0):
    logs = {"loss": 0.5}
    callbacks.on_epoch_end(epoch, logs)
    return logs


def test_rows_are_divided_by_the_time_of_the_epoch(clock):
    callbacks = begin(Throughput())
    clock.now += 100.0  # before the epoch
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        execute(callbacks, clock, 3, rows=32, secs=2.0)
        execute(callbacks, clock, 4, rows=8, secs=3.0 + 5 * epoch)
        assert end_epoch(callbacks, epoch) == {"loss": 0.5, "rows_per_sec": (8.0, 4.0)[epoch]}
        clock.now += 100.0  # between epochs


def test_compiling_does_not_count(clock):
    callbacks = begin(Throughput())
    callbacks.on_epoch_begin(0)
    with callbacks.model.current_run.timing.compile:
        clock.now += 60.0
    execute(callbacks, clock, 0, rows=10, secs=2.0)
    assert end_epoch(callbacks)["rows_per_sec"] == 5.0


def test_validations_do_not_count_at_the_end_of_an_epoch_or_in_its_middle(clock):
    callbacks = begin(Throughput())
    callbacks.on_epoch_begin(0)
    for batch in range(2):
        execute(callbacks, clock, batch, rows=10, secs=2.0)
        callbacks.on_test_begin()
        clock.now += 30.0
        with callbacks.model.current_run.timing.compile:
            clock.now += 60.0
        callbacks.on_execution_end("test", 0, {})
        callbacks.on_test_end({})
    assert end_epoch(callbacks)["rows_per_sec"] == 5.0


def test_callbacks_count_between_batches_but_not_at_the_end_of_an_epoch(clock):
    class Slow(Callback):
        def on_execution_end(self, phase, batch, logs=None):
            clock.now += 3.0

        def on_epoch_end(self, epoch, logs=None):
            clock.now += 50.0

    callbacks = begin(Throughput())
    callbacks.callbacks.insert(0, Slow())
    callbacks.on_epoch_begin(0)
    execute(callbacks, clock, 0, rows=10, secs=2.0)
    assert end_epoch(callbacks)["rows_per_sec"] == 2.0


def test_another_run_inside_of_a_callback_does_not_count(clock):
    callbacks = begin(Throughput())
    timing = callbacks.model.current_run.timing
    callbacks.on_epoch_begin(0)
    for batch in range(2):
        execute(callbacks, clock, batch, rows=10, secs=2.0)
        with timing.callbacks:
            clock.now += 40.0
            timing.inner_secs += 40.0
    assert end_epoch(callbacks)["rows_per_sec"] == 5.0


def test_the_wait_for_the_device_counts_at_the_end_of_an_epoch_and_before_a_validation(clock):
    def fetch():
        clock.now += 3.0
        return {"loss": 0.5}

    for validates in (False, True):
        callbacks = begin(Throughput())
        callbacks.on_epoch_begin(0)
        clock.now += 2.0
        callbacks.model.current_run.timing.rows += 10
        callbacks.on_execution_end("train", 0, LazyLogs(["loss"], fetch))
        clock.now += 40.0  # such as the validation's data
        if validates:
            callbacks.on_test_begin()
            callbacks.on_test_end()
        assert end_epoch(callbacks)["rows_per_sec"] == 2.0


def test_a_callback_that_comes_before_it_may_validate(clock):
    class Validates(Callback):
        def on_execution_end(self, phase, batch, logs=None):
            if phase == "train":
                clock.now += 1.0  # waits for the step
                callbacks.on_test_begin()
                clock.now += 30.0
                callbacks.on_test_end()

    callbacks = begin(Throughput())
    callbacks.callbacks.insert(0, Validates())
    callbacks.on_epoch_begin(0)
    for batch in range(3):
        execute(callbacks, clock, batch, rows=15, secs=4.0)
    assert end_epoch(callbacks)["rows_per_sec"] == 3.0


def test_operations_follow_the_rows_of_a_full_batch(clock):
    callbacks = begin(Throughput(), flops=800.0)
    callbacks.on_epoch_begin(0)
    execute(callbacks, clock, 3, rows=4 * 16, secs=2.0)
    execute(callbacks, clock, 4, rows=4, secs=2.0)
    # 68 rows in 4 seconds, and 50 operations for each.
    assert end_epoch(callbacks) == {"loss": 0.5, "rows_per_sec": 17.0, "model_flops_per_sec": 850.0}


def test_a_run_that_resumes_in_an_epoch_counts_the_batches_that_it_ran(clock):
    callbacks = begin(Throughput(), flops=800.0)
    callbacks.on_epoch_begin(0)
    callbacks.next_sync_step("train", 6)
    clock.now += 1.0
    callbacks.model.current_run.timing.rows += 32
    callbacks.on_execution_end("train", 7, {})
    assert end_epoch(callbacks)["model_flops_per_sec"] == 1600.0


@pytest.mark.parametrize(("peak", "kind", "utilization"), [
    (1000.0, "a device that nobody knows", 0.25),
    (None, "a device that nobody knows", None),
    (None, "TPU v4", 500 / 550e12),
    (None, "NVIDIA H100 80GB HBM3", 500 / 1979e12),
    (1000.0, "TPU v4", 0.25),
])
def test_the_utilization_is_of_the_peak_of_all_devices(peak, kind, utilization, clock):
    callbacks = begin(Throughput(peak_flops_per_sec=peak), flops=1000.0, kind=kind)
    callbacks.on_epoch_begin(0)
    execute(callbacks, clock, 0, rows=16, secs=2.0)
    assert end_epoch(callbacks).get("utilization") == pytest.approx(utilization)


def test_an_epoch_without_batches_has_no_rate(clock):
    callbacks = begin(Throughput())
    callbacks.on_epoch_begin(0)
    clock.now += 1.0
    assert end_epoch(callbacks) == {"loss": 0.5}


# In a fit


def test_a_fit_has_them_in_its_history_and_they_can_be_monitored():
    x, y, _ = classification(40)
    model = compiled_mlp(steps_per_execution=4)
    stopping = EarlyStopping("rows_per_sec", mode="max", patience=10)
    history = model.fit(x, y, batch_size=8, epochs=2, callbacks=[Throughput(1e15), stopping], verbose=0)
    assert stopping.best == max(history.history["rows_per_sec"])
    # The training of 40 rows cannot have taken longer than the whole.
    assert min(history.history["rows_per_sec"]) > 40 / history.timing["total"]
    flops_of_a_row = model.current_run.train_step_flops() / 8
    np.testing.assert_allclose(
        history.history["model_flops_per_sec"], flops_of_a_row * np.array(history.history["rows_per_sec"]))
    np.testing.assert_allclose(
        history.history["utilization"], np.array(history.history["model_flops_per_sec"]) / 1e15)


@pytest.mark.slow
def test_a_slow_validation_in_mid_epoch_leaves_the_rate_alone():
    x, y, _ = classification(32)

    class SlowData:
        def __iter__(self):
            time.sleep(0.4)
            yield x, y

    own, of_fit = ValidateEvery(2, validation_data=SlowData()), ValidateEvery(2)
    for callbacks in ([own, of_fit, Throughput()], [Throughput(), own, of_fit]):
        history = compiled_mlp(steps_per_execution=2).fit(
            x, y, batch_size=8, callbacks=callbacks, validation_data=SlowData(), verbose=0)
        assert 32 / history.history["rows_per_sec"][0] < history.timing["total"] - 5 * 0.4


@pytest.mark.slow
def test_the_steps_of_an_epoch_have_ended_when_its_time_is_taken():
    class Slow(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(jax.lax.fori_loop(0, 20, lambda _, x: jax.numpy.tanh(x @ x.T) @ x / 1000, x))

    x, y = np.ones((2048, 512), np.float32), np.ones((2048, 1), np.float32)
    with mirrored(1).scope():
        model = trainer.Model(Slow())
    model.compile("sgd", "mse")
    model.trainable = False
    begin = time.perf_counter()
    history = model.fit(x, y, batch_size=1024, epochs=2, callbacks=[Throughput()], verbose=0).history
    secs = 2 * 2048 / np.mean(history["rows_per_sec"])
    assert 0.1 < secs < time.perf_counter() - begin
