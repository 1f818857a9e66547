"""ValidateEvery validates after the batches or minutes asked for, and changes nothing of the training."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

import trainer
from tests.support.clock import StandingClock
from tests.support.networks import LinenMLP, classification, logits_loss, mirrored
from trainer.callbacks import Callback, CallbackList, validate_every
from trainer.callbacks.validate_every import ValidateEvery


def make_model(replicas=1, steps_per_execution=4):
    with mirrored(replicas).scope():
        model = trainer.Model(LinenMLP(batch_norm=True, dropout=0.2), seed=1)
        model.compile("adam", logits_loss(), metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def fake_run(callback, losses=(), has_validation_data=True):
    """Returns a callback list of one callback, in a run whose validations have these losses."""
    losses = iter(losses)
    model = types.SimpleNamespace(validate=lambda: {"loss": next(losses)},
        current_run=types.SimpleNamespace(has_validation_data=has_validation_data))
    callbacks = CallbackList([callback], model=model, verbose=0)
    callbacks.on_train_begin()
    return callbacks


def run_batches(callbacks, batches, most=4):
    """Runs batches of an epoch as the loop does, `most` in an execution; returns where executions ended."""
    ends, batch = [], batches.start
    while batch < batches.stop:
        look = callbacks.next_sync_step("train", batch)
        last = min(batch + most, batches.stop, batches.stop if look is None else look + 1) - 1
        callbacks.on_execution_end("train", last, {})
        ends.append(last)
        batch = last + 1
    return ends


class Executions(Callback):
    """Notes where train executions ended."""

    def __init__(self):
        self.ends = []

    def on_execution_end(self, phase, batch, logs=None):
        if phase == "train":
            self.ends.append(batch)


# In a fit


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "own_data"), [(1, True), (3, False)])
def test_weights_and_logs_of_the_training_are_the_same_bits_with_and_without_it(replicas, own_data):
    x, y, w = classification(52)

    def fit(*callbacks):
        model = make_model(replicas)
        history = model.fit(x, y, batch_size=8, epochs=3, sample_weight=w, validation_data=(x[:9], y[:9]),
                            callbacks=list(callbacks), verbose=0)
        return model.state, history.history

    every = ValidateEvery(3, validation_data=(x[:20], y[:20], w[:20]) if own_data else None)
    (state, history), (plain_state, plain_history) = fit(every), fit()
    assert history == plain_history
    for leaf, plain in zip(jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True):
        np.testing.assert_array_equal(leaf, plain)
    assert every.history["step"] == [3, 6, 9, 12, 15, 18, 21]


@pytest.mark.slow
def test_its_logs_are_those_of_evaluate_with_the_weights_of_the_step():
    x, y, w = classification(24)
    expected = []

    class Evaluates(Callback):
        def on_train_batch_end(self, batch, logs=None):
            expected.append(self.model.evaluate(x, y, sample_weight=w, verbose=0))

    every = ValidateEvery(2, validation_data=(x, y, w))
    make_model().fit(x, y, batch_size=8, epochs=2, callbacks=[Evaluates(), every], verbose=0)
    assert every.history["step"] == [2, 4, 6]
    assert every.history["val_loss"] == [logs["loss"] for logs in expected[1::2]]
    assert every.history["val_accuracy"] == [logs["accuracy"] for logs in expected[1::2]]
    assert every.last_logs == {f"val_{name}": value for name, value in expected[5].items()}
    assert len(set(every.history["val_loss"])) == 3


@pytest.mark.slow
def test_without_data_it_validates_on_those_of_fit():
    x, y, _ = classification(32)
    every = ValidateEvery(4)
    history = make_model().fit(x, y, batch_size=8, epochs=2, validation_data=(x[:10], y[:10]), callbacks=[every],
                               verbose=0).history
    # The last batch of each epoch is the fourth one.
    assert every.history == {"step": [4, 8], "val_loss": history["val_loss"], "val_accuracy": history["val_accuracy"]}


@pytest.mark.slow
def test_batches_can_be_validated_on():
    x, y, _ = classification(16)
    dataset = trainer.data.Dataset.from_arrays((x, y)).batch(16)
    batches, arrays = ValidateEvery(2, validation_data=dataset), ValidateEvery(2, validation_data=[x, y])
    make_model().fit(x, y, batch_size=4, callbacks=[batches, arrays], verbose=0)
    assert batches.history["step"] == [2, 4]
    np.testing.assert_allclose(batches.history["val_loss"], arrays.history["val_loss"], rtol=1e-6)


@pytest.mark.slow
def test_batches_stay_fused_between_validations():
    x, y, _ = classification(80)
    executions = Executions()
    every = ValidateEvery(6, validation_data=(x, y))
    make_model().fit(x, y, batch_size=8, epochs=2, callbacks=[every, executions], verbose=0)
    assert not CallbackList([every]).wants_batch_hooks("train")
    # Groups of four end after 3, 7 and 9; batches 6 and 12 of the fit are 5 of the first epoch and 1 of the second.
    assert executions.ends == [3, 5, 7, 9, 1, 3, 7, 9]
    assert every.history["step"] == [6, 12, 18]


@pytest.mark.slow
def test_a_validation_without_data_anywhere_is_refused_before_the_first_batch():
    x, y, _ = classification(8)
    model = make_model()
    with pytest.raises(ValueError, match=r"`ValidateEvery` has nothing to validate on\. Pass `validation_data`"):
        model.fit(x, y, callbacks=[ValidateEvery(100)], verbose=0)
    assert int(model.state.step) == 0


# When


def test_batches_count_over_epochs_and_anew_in_each_fit():
    every = ValidateEvery(5)
    callbacks = fake_run(every, losses=range(100))
    for _ in range(2):
        callbacks.on_train_begin()
        ends = []
        for epoch in range(3):
            callbacks.on_epoch_begin(epoch)
            ends.append(run_batches(callbacks, range(7)))
        assert every.history["step"] == [5, 10, 15, 20]
        assert ends == [[3, 4, 6], [2, 6], [0, 4, 5, 6]]


def test_one_validates_after_every_batch_with_steps_of_1():
    every = ValidateEvery(1)
    callbacks = fake_run(every, losses=range(10))
    assert run_batches(callbacks, range(3)) == [0, 1, 2]
    assert every.history == {"step": [1, 2, 3], "val_loss": [0, 1, 2]}


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_resumed_run_validates_after_the_same_batches(cut):
    def run(state=None, done=0):
        every = ValidateEvery(5)
        callbacks = fake_run(every, losses=range(sum(number % 5 == 0 for number in range(1, 7 + done + 1)), 100)
                             if state else range(100))
        for epoch in range(1 if state else 0, 3):
            callbacks.on_epoch_begin(epoch)
            if state and epoch == 1:
                callbacks.load_state_dict(state)
            run_batches(callbacks, range(done if state and epoch == 1 else 0, 7))
        return every

    whole = run()
    interrupted = ValidateEvery(5)
    callbacks = fake_run(interrupted, losses=range(100))
    for epoch, batches in ((0, range(7)), (1, range(cut))):
        callbacks.on_epoch_begin(epoch)
        run_batches(callbacks, batches)
    resumed = run(callbacks.state_dict(), done=cut)
    assert resumed.history == whole.history
    assert resumed.state_dict() == whole.state_dict()


def test_a_run_resumed_between_epochs_validates_after_the_same_batches():
    before = fake_run(ValidateEvery(5), losses=range(9))
    before.on_epoch_begin(0)
    run_batches(before, range(7))
    every = ValidateEvery(5)
    after = fake_run(every, losses=range(1, 9))
    after.load_state_dict(before.state_dict())
    after.on_epoch_begin(1)
    run_batches(after, range(7))
    assert every.history == {"step": [5, 10], "val_loss": [0, 1]}


def test_minutes_are_looked_at_when_an_execution_ends(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(validate_every, "time", clock)
    every = ValidateEvery(minutes=2)
    callbacks = fake_run(every, losses=range(100))
    for batch in range(8):
        clock.now += 50
        assert callbacks.next_sync_step("train", batch) is None
        callbacks.on_execution_end("train", batch, {})
    assert every.history["step"] == [3, 6]


def test_the_time_of_a_validation_does_not_count_as_waiting(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(validate_every, "time", clock)
    every = ValidateEvery(minutes=1)
    callbacks = fake_run(every)

    def validate():
        clock.now += 3600
        return {"loss": 0.5}

    callbacks.model.validate = validate
    for batch in range(6):
        clock.now += 30
        callbacks.on_execution_end("train", batch, {})
    assert every.history["step"] == [2, 4, 6]


def test_minutes_go_on_counting_in_a_resumed_run(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(validate_every, "time", clock)
    before = fake_run(ValidateEvery(minutes=2))
    clock.now += 100
    state = before.state_dict()
    clock.now += 1e6  # until somebody starts it again
    every = ValidateEvery(minutes=2)
    after = fake_run(every, losses=[0.5])
    after.load_state_dict(state)
    clock.now += 19
    after.on_execution_end("train", 0, {})
    assert every.history["step"] == []
    clock.now += 1
    after.on_execution_end("train", 1, {})
    assert every.history["step"] == [2]


def test_executions_of_other_phases_do_not_count():
    every = ValidateEvery(2)
    callbacks = fake_run(every, losses=range(9))
    for batch in range(4):
        callbacks.on_execution_end("test", batch, {})
    assert every.history == {"step": []}


# What it prints and refuses


def test_it_prints_a_line_only_if_asked_to(capsys):
    for verbose, line in ((1, "\nStep 1: val_loss: 0.2500\n"), (0, "")):
        run_batches(fake_run(ValidateEvery(1, verbose=verbose), losses=[0.25]), range(1))
        assert capsys.readouterr().out == line


def test_minutes_are_refused_in_a_run_of_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fake_run(ValidateEvery(3))
    with pytest.raises(ValueError, match=r"in a run of several processes: .* Use `steps`"):
        fake_run(ValidateEvery(minutes=3))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({}, ValueError, "takes either `steps` or `minutes`. Received: steps=None, minutes=None"),
    ({"steps": 1, "minutes": 1}, ValueError, "takes either `steps` or `minutes`"),
    ({"steps": 0}, ValueError, "`steps` must be a whole number of at least 1 or None. Received: steps=0"),
    ({"minutes": -0.5}, ValueError, "`minutes` must be a number above 0. Received: minutes=-0.5"),
    ({"minutes": float("nan")}, ValueError, "`minutes` must be a number above 0. Received: minutes=nan"),
    ({"steps": 2.0}, TypeError, "`steps` must be a whole number .* type float"),
    ({"steps": True}, TypeError, "`steps` must be a whole number .* type bool"),
    ({"minutes": "5"}, TypeError, "`minutes` must be a number above 0. Received: str"),
    ({"steps": 1, "validation_data": (1, 2, 3, 4)}, ValueError, "Received: a tuple of 4"),
    ({"steps": 1, "validation_data": iter([1])}, ValueError, "iterated again .* Received: a list_iterator"),
])
def test_arguments_that_cannot_be_meant_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ValidateEvery(**arguments)


def test_numpy_numbers_are_taken():
    assert (ValidateEvery(np.int64(3)).steps, ValidateEvery(minutes=np.float32(0.5)).minutes) == (3, 0.5)


@pytest.mark.slow
def test_a_generator_that_has_nothing_left_to_validate_on_is_an_error():
    x, y, _ = classification(32)
    callback = ValidateEvery(steps=1)
    with pytest.raises(ValueError, match="The data ran out: the generator has no batch left after the 2 that were"):
        make_model().fit(x, y, batch_size=8, validation_data=((x[:8], y[:8]) for _ in range(2)), validation_steps=1,
                         validation_freq=[9], callbacks=[callback], verbose=0)
    assert len(callback.history["val_loss"]) == 2
