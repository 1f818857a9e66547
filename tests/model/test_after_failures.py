"""A call that fails or is interrupted leaves the model usable, and later calls as strict as the first."""

from __future__ import annotations

import os
import signal

import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import classification, logits_loss
from trainer.engine.loop.loop import Interrupts
from trainer.engine.model.core.model_core import core_of
from trainer.engine.model.core.state_holder import StateHolder


def compiled(kind=trainer.Model, **options):
    model = kind(nn.Dense(3))
    model.compile(**{"optimizer": optax.sgd(0.1), "loss": logits_loss(), **options})
    return model


@pytest.fixture
def default_interrupts():
    """A process started in the background ignores Ctrl-C, and would here too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupts")
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_an_interrupt_takes_effect_once_the_trained_state_is_stored(method, monkeypatch):
    x, y, _ = classification(16)
    model = compiled()
    model.train_on_batch(x, y)
    set_state = StateHolder.set

    def interrupted(holder, state):
        """Gets Ctrl-C when a step has donated the old state, and the new one is not stored yet."""
        os.kill(os.getpid(), signal.SIGINT)
        set_state(holder, state)

    monkeypatch.setattr(StateHolder, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(model, method)(x, y)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert int(model.state.step) == 2
    model.fit(x, y, batch_size=16, verbose=0)
    assert int(model.state.step) == 3


@pytest.mark.slow
def test_a_compile_that_fails_changes_nothing():
    x, y, _ = classification(16)
    model = compiled()
    loss = model.evaluate(x, y, verbose=0)
    with pytest.raises(ValueError, match="adamm"):
        model.compile("adamm", "mse", metrics=["mae"])
    assert model.evaluate(x, y, verbose=0) == loss
    assert list(model.fit(x, y, verbose=0).history) == ["loss"]


def test_logits_are_refused_by_every_fit_and_not_only_the_first():
    x, y, _ = classification(16)
    model = compiled(loss="sparse_categorical_crossentropy")
    for _ in range(2):
        with pytest.raises(ValueError, match="from_logits"):
            model.fit(10 * x, y, verbose=0)


def test_a_second_fit_on_other_features_is_refused_in_words_that_help():
    x, y, _ = classification(16)
    model = compiled()
    model.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match=r"rows of shape \(4,\).*built on rows of shape \(6,\)"):
        model.fit(x[:, :4], y, verbose=0)
    model.fit(x, y, verbose=0)


def test_arrays_of_the_optimizer_stay_valid_while_training_goes_on():
    x, y, _ = classification(16)
    model = compiled(optimizer="adam")
    model.fit(x, y, verbose=0)
    held = model.optimizer.variables
    before = [np.array(array) for array in held]
    model.fit(x, y, verbose=0)
    for array, value in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, value)


@pytest.mark.usefixtures("default_interrupts")
def test_an_interrupt_reaches_a_handler_that_a_callback_put_before_the_present_one():
    received = []

    def chain(batch, logs):
        if not received:
            present = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, lambda *arguments: received.append(batch) or present(*arguments))
            received.append("set")

    def interrupt(epoch, logs):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    x, y, _ = classification(16)
    callbacks = trainer.callbacks.LambdaCallback(on_train_batch_end=chain, on_epoch_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiled().fit(x, y, epochs=3, verbose=0, callbacks=[callbacks])
    assert received == ["set", 0]


@pytest.mark.slow
def test_steps_without_logs_are_not_queued_without_end():
    class Silent(trainer.Model):
        def train_step(self, state, batch):
            return {}, super().train_step(state, batch)[1]

    x, y, _ = classification(16)
    model = compiled(Silent)
    assert model.fit(x, y, epochs=2, verbose=0).history == {}
    assert core_of(model).configuration.phases["train"].empty_logs, "there is something to wait for"


@pytest.mark.usefixtures("default_interrupts")
def test_an_interrupt_while_the_handler_is_swapped_leaves_the_users_handler(monkeypatch):
    swap = signal.signal

    def interrupted(number, handler):
        before = swap(number, handler)
        signal.raise_signal(signal.SIGINT)
        return before

    with pytest.raises(KeyboardInterrupt), Interrupts():
        monkeypatch.setattr(signal, "signal", interrupted)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Interrupts().__enter__()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
