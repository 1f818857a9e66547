"""What becomes of a training whose loss or gradients are not finite: it ends, or leaves these updates out."""

from __future__ import annotations

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tests.networks import classification, compiled_mlp
from trainer.callbacks import Callback, CallbackList, LambdaCallback, LazyLogs, TerminateOnNaN

ROWS, BATCH = 64, 8  # eight batches


def data_with(value, *batches):
    """Returns rows and labels; the first row of these batches has the value in it."""
    x, y, _ = classification(ROWS)
    for batch in batches:
        x[batch * BATCH] = value
    return x, y


def fit(model, x, y, *callbacks, **options):
    return model.fit(x, y, batch_size=BATCH, shuffle=False, callbacks=list(callbacks), verbose=0, **options)


class Recorder(Callback):
    """Notes where train executions ended, and which epochs did."""

    def __init__(self):
        self.ends, self.epochs = [], []

    def on_execution_end(self, phase, batch, logs=None):
        self.ends.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def fake_model(params=None, model_state=None):
    """Returns a model with these weights, each the only leaf below its name."""
    params, model_state = params or {}, model_state or {}
    return types.SimpleNamespace(
        stop_training=False, current_state=types.SimpleNamespace(params=params, model_state=model_state),
        get_weights=lambda: [np.asarray(leaf) for _, leaf in [*sorted(params.items()), *sorted(model_state.items())]])


# --- TerminateOnNaN ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "bad", "ends", "named"), [
    # It looks at an execution once the next one has begun.
    (1, 2, [0, 1, 2, 3], "Batch 2: Invalid loss, terminating training. Weights"),
    (4, 2, [3, 7], "Batch 3: Invalid loss, terminating training. It is one of the batches 0 to 3, which ran as one"),
    (3, 7, [2, 5, 7], "Batch 7: Invalid loss, terminating training. It is one of the batches 6 to 7, which ran as one"),
])
def test_a_fit_ends_at_most_one_execution_late_and_says_where_the_loss_was_lost(fused, bad, ends, named, capsys):
    recorder = Recorder()
    model = compiled_mlp(steps_per_execution=fused)
    fit(model, *data_with(np.nan, bad), TerminateOnNaN(), recorder, epochs=3)
    assert recorder.ends == ends and recorder.epochs == [0]
    printed = capsys.readouterr().out
    assert named in printed and printed.count("Invalid loss") == 1
    assert "Weights that are not finite: Dense_0/bias, Dense_0/kernel, Dense_1/bias, Dense_1/kernel, of 4." in printed


def test_an_infinite_loss_ends_the_training_too():
    model = compiled_mlp(steps_per_execution=2)
    x, y = data_with(np.inf, 1)
    with pytest.raises(RuntimeError, match=r"NaN or Inf loss encountered at batch 1\. Loss value: (nan|inf)\. "
                                           r"Terminating training immediately\. It is one of the batches 0 to 1"):
        fit(model, x, y, TerminateOnNaN(raise_error=True))
    assert int(model.state.step) == 4


@pytest.mark.parametrize("raises", [True, False])
def test_the_last_execution_of_an_epoch_is_looked_at_before_the_callbacks_behind_it_see_the_epoch(raises):
    recorder, stops = Recorder(), []
    watcher = LambdaCallback(on_epoch_end=lambda epoch, logs: stops.append(model.stop_training))
    model = compiled_mlp(steps_per_execution=4)
    callbacks = [TerminateOnNaN(raise_error=raises), watcher, recorder]
    if raises:
        with pytest.raises(RuntimeError, match="at batch 7"):
            fit(model, *data_with(np.nan, 7), *callbacks, epochs=2)
    else:
        fit(model, *data_with(np.nan, 7), *callbacks, epochs=2)
    assert (stops, recorder.epochs) == (([], []) if raises else ([True], [0]))


def test_a_training_with_finite_losses_runs_as_without_it():
    plain, watched = Recorder(), Recorder()
    histories = [fit(compiled_mlp(steps_per_execution=4), *data_with(0.0), *callbacks, epochs=2).history
                 for callbacks in ([plain], [TerminateOnNaN(), watched])]
    assert histories[0] == histories[1]
    assert plain.ends == watched.ends == [3, 7, 3, 7]


def test_a_fit_after_one_that_was_ended_starts_afresh(capsys):
    model, callback = compiled_mlp(steps_per_execution=1), TerminateOnNaN()
    x, y = data_with(np.nan, 0)
    for _ in range(2):
        fit(model, x, y, callback)
        assert capsys.readouterr().out.count("Batch 0: Invalid loss") == 1


def test_it_reads_no_execution_before_the_next_one_has_begun():
    happened = []

    def logs_of(number):
        return LazyLogs(["loss"], lambda: happened.append(f"read {number}") or {"loss": 0.5},
                        lambda: happened.append(f"begin {number}"))

    callback = TerminateOnNaN()
    callback.set_model(fake_model())
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    for number in range(3):
        happened.append(f"run {number}")
        callback.on_execution_end("train", number, logs_of(number))
    callback.on_execution_end("test", 0, logs_of("a validation"))
    callback.on_epoch_end(0, {"loss": 0.5})
    assert happened == ["run 0", "begin 0", "run 1", "begin 1", "read 0", "run 2", "begin 2", "read 1", "read 2"]


def test_it_keeps_no_batches_from_being_fused_and_reads_none_for_another_callback_that_does(capsys):
    watcher = LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    callbacks = CallbackList([TerminateOnNaN(), watcher], model=fake_model())
    assert not CallbackList([TerminateOnNaN()]).wants_batch_hooks("train") and callbacks.wants_batch_hooks("train")

    def refuse():
        raise AssertionError("this waits for the device")

    callbacks.on_train_begin()
    callbacks.on_train_batch_end(0, LazyLogs(["loss"], refuse))


def test_a_subclass_that_wants_every_batch_gets_it():
    class Own(TerminateOnNaN):
        def on_batch_end(self, batch, logs=None):
            pass

    assert CallbackList([Own()]).wants_batch_hooks("train")


@pytest.mark.parametrize("hook", ["on_batch_end", "on_train_batch_end"])
@pytest.mark.parametrize("loss", [np.nan, -np.inf, np.float32(np.nan)])
def test_a_batch_hook_that_is_called_by_hand_looks_at_once(hook, loss, capsys):
    callback = TerminateOnNaN()
    callback.set_model(fake_model({"kernel": jnp.ones(2)}))
    callback.on_train_begin()
    getattr(callback, hook)(2, {"loss": 0.5})
    assert not callback.model.stop_training
    getattr(callback, hook)(3, {"loss": loss})
    assert callback.model.stop_training
    assert capsys.readouterr().out == "Batch 3: Invalid loss, terminating training. All weights are finite.\n"


@pytest.mark.parametrize(("params", "model_state", "sentence"), [
    ({f"w{index}": jnp.array([1, jnp.nan]) for index in range(8)}, {},
     "Weights that are not finite: w0, w1, w2, w3, w4 and 3 more, of 8."),
    ({"half": jnp.array([jnp.inf], jnp.bfloat16), "count": jnp.arange(3)}, {"mean": jnp.array(jnp.nan)},
     "Weights that are not finite: half, mean, of 3."),
    ({"kernel": jnp.ones(2)}, {"mean": jnp.ones(2)}, "All weights are finite."),
])
def test_weights_that_are_not_finite_are_named(params, model_state, sentence):
    callback = TerminateOnNaN(raise_error=True)
    callback.set_model(fake_model(params, model_state))
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        callback.on_batch_end(0, {"loss": np.nan})
