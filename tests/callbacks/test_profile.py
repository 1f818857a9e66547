"""Profile records just the batches asked for, fused as ever, and leaves no profiler running."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from tests.support.networks import classification, compiled_mlp
from trainer.callbacks import Callback, CallbackList
from trainer.callbacks.profile import Profile


@pytest.fixture(scope="module")
def model():
    """A model that fuses four steps."""
    return compiled_mlp(steps_per_execution=4)


@pytest.fixture
def calls(monkeypatch):
    """What is asked of JAX's profiler, which does nothing: "start", "stop" and the numbers of steps, in order."""
    calls = []

    class Annotation:
        def __init__(self, name, step_num):
            self.number = step_num

        def __enter__(self):
            calls.append(self.number)

        def __exit__(self, *error):
            calls.append("end")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", Annotation)
    return calls


class Executions(Callback):
    """Puts each train execution, as its first and last batch in the epoch, and each validation into a list."""

    def __init__(self, calls):
        self.calls, self.first = calls, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.first = 0

    def on_execution_end(self, phase, batch, logs=None):
        self.calls.append((self.first, batch) if phase == "train" else phase)
        self.first = batch + 1


def begin(profile, **params):
    model = types.SimpleNamespace(current_run=types.SimpleNamespace(state=None))
    callbacks = CallbackList([profile], model=model, verbose=0, **params)
    callbacks.on_train_begin()
    return callbacks


def fit(model, *callbacks, rows=64, **options):
    x, y, _ = classification(rows)
    model.fit(x, y, batch_size=8, callbacks=list(callbacks), verbose=0, **options)


# In a fit


@pytest.mark.slow
def test_a_profile_is_where_tensorboard_looks_and_the_next_fit_writes_another(tmp_path, model):
    profile = Profile(tmp_path, steps=(3, 6))
    fit(model, profile)
    (first,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert first.stat().st_size > 0
    first.unlink()
    fit(model, profile)
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1


@pytest.mark.parametrize(("steps", "expected"), [
    ((3, 6), [(0, 1), "start", 3, (2, 3), "end", 5, (4, 5), "end", "stop", (6, 7)]),
    ((1, 1), ["start", 1, (0, 0), "end", "stop", (1, 3), (4, 7)]),
    ((8, 8), [(0, 3), (4, 6), "start", 8, (7, 7), "end", "stop"]),
    ((20, 30), [(0, 3), (4, 7)]),
    ((5, 30), [(0, 3), "start", 5, (4, 7), "end", 9, "end", "stop"]),  # the end of the fit
])
def test_executions_are_cut_before_the_first_batch_and_after_the_last_only(steps, expected, calls, tmp_path, model):
    fit(model, Executions(calls), Profile(tmp_path, steps=steps))
    assert calls == expected


def test_a_profile_that_begins_with_an_epoch_does_not_have_the_validation_before_it(calls, tmp_path, model):
    x, y, _ = classification(8)
    fit(model, Executions(calls), Profile(tmp_path, steps=(5, 6)),
        rows=32, epochs=2, validation_data=(x, y))
    assert calls == [(0, 3), "test", "start", 5, (0, 1), "end", "stop", (2, 3), "test"]


def test_a_profile_over_two_epochs_has_no_step_that_is_a_validation(calls, tmp_path, model):
    x, y, _ = classification(8)
    fit(model, Executions(calls), Profile(tmp_path, steps=(3, 6)),
        rows=32, epochs=2, validation_data=(x, y))
    assert calls == [(0, 1), "start", 3, (2, 3), "end", 5, "end", "test", 5, (0, 1), "end", "stop", (2, 3), "test"]


def test_weights_are_the_same_bits_with_and_without_it(tmp_path, calls, model):
    fit(model)
    start, trained = model.state, []
    for callbacks in ([], [Profile(tmp_path, steps=(3, 6))]):
        model.state = start
        fit(model, *callbacks)
        trained.append(model.get_weights())
    assert calls.count("stop") == 1
    for plain, profiled in zip(*trained, strict=True):
        np.testing.assert_array_equal(plain, profiled)


def test_a_training_that_is_stopped_or_fails_in_the_middle_leaves_no_profiler_running(calls, tmp_path, model):
    class Ends(Callback):
        def __init__(self, fails):
            self.fails = fails

        def on_execution_end(self, phase, batch, logs=None):
            self.model.stop_training = True
            if self.fails:
                raise RuntimeError("on purpose")

    profile = Profile(tmp_path, steps=(1, 30))
    fit(model, profile, Ends(fails=False))
    assert calls[0] == "start" and calls[-1] == "stop" and calls.count("start") == 1
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(model, profile, Ends(fails=True))
    assert calls.count("stop") == 1
    fit(model, profile)
    assert [call for call in calls if call in ("start", "stop")] == ["start", "stop"] * 3


# What it decides


def test_the_device_is_waited_for_before_the_profile_and_at_its_end(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "block_until_ready", lambda state: calls.append("wait"))
    callbacks = begin(Profile(tmp_path, steps=(3, 4)))
    callbacks.on_epoch_begin(0)
    for batch in range(6):
        callbacks.on_execution_end("train", batch, {})
    assert calls == ["wait", "start", 3, "end", 4, "end", "wait", "stop"]


def test_batches_count_over_epochs_and_anew_in_each_fit(calls, tmp_path):
    callbacks = begin(Profile(tmp_path, steps=(4, 5)))
    for _ in range(2):
        callbacks.on_train_begin()
        for epoch in range(3):
            callbacks.on_epoch_begin(epoch)
            for batch in range(2):
                callbacks.on_execution_end("train", batch, {})
        callbacks.on_train_end()
        assert calls == ["start", 4, "end", 5, "end", 5, "end", "stop"]
        calls.clear()


def test_a_run_that_resumes_in_an_epoch_counts_its_own_batches(calls, tmp_path):
    callbacks = begin(Profile(tmp_path, steps=(3, 4)))
    callbacks.on_epoch_begin(7)
    assert callbacks.next_sync_step("train", 100) == 101
    callbacks.on_execution_end("train", 101, {})
    assert callbacks.next_sync_step("train", 102) == 103
    callbacks.on_execution_end("train", 103, {})
    assert callbacks.next_sync_step("train", 104) is None
    assert calls == ["start", 3, "end", "stop"]


def test_only_the_first_process_records(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    callbacks = begin(Profile(tmp_path, steps=(1, 2)))
    callbacks.on_epoch_begin(0)
    # All processes cut their executions alike.
    assert callbacks.next_sync_step("train", 0) == 1
    callbacks.on_execution_end("train", 1, {})
    callbacks.on_train_end()
    assert calls == []


def test_a_profiler_that_fails_only_warns(tmp_path, monkeypatch, calls):
    def fail(*arguments):
        raise RuntimeError("another profile runs")

    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    callbacks = begin(Profile(tmp_path, steps=(1, 2)))
    with pytest.warns(UserWarning, match="`Profile` cannot start to profile: another profile runs"):
        callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 1, {})
    assert calls == []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    with pytest.warns(UserWarning, match="`Profile` cannot write the profile: another profile runs"):
        callbacks.on_execution_end("train", 1, {})
