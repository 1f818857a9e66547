"""Messages of the wrong calls that newcomers make name what was received, and the fix."""

import re

import jax.numpy as jnp
import pytest
from flax import linen as nn

import trainer
from tests.support.newcomers_calls import CALLS, X, Y, message_of
from tests.support.newcomers_warned_calls import WARNED


@pytest.fixture(scope="module", autouse=True)
def a_first_program():
    """The first program of a process takes a busy machine seconds; a call that is refused leaves its thread so long."""
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_a_message_names_what_was_received_and_the_fix(name):
    wrong = CALLS[name]
    message = message_of(wrong.call)
    assert re.search(wrong.received, message) and re.search(wrong.fix, message, re.DOTALL), message or "no error"


@pytest.mark.parametrize("name", WARNED)
def test_a_call_that_trains_to_nothing_is_warned_of(name):
    call, words = WARNED[name]
    with pytest.warns(UserWarning, match=words):
        call()


def test_the_calls_are_many_and_different():
    assert len(CALLS) >= 60 and len({(wrong.received, wrong.fix) for wrong in CALLS.values()}) >= 55


@pytest.mark.slow
def test_a_compute_loss_may_have_keras_signature():
    class Own(trainer.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return jnp.mean(jnp.square(y - y_pred)) + (0.0 if training else 1.0)

    model = Own(nn.Dense(1))
    model.compile("sgd")
    before = model.evaluate(X, Y, verbose=0)["loss"]
    assert model.fit(X, Y, verbose=0).history["loss"][0] == pytest.approx(before - 1.0, rel=1e-5)


def test_attributes_of_a_model_that_fail_keep_their_errors():
    class Own(trainer.Model):
        @property
        def parameters(self):
            raise AttributeError("of its own")

    with pytest.raises(AttributeError, match="of its own"):
        Own(nn.Dense(1)).parameters  # noqa: B018
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        trainer.Model(nn.Dense(1)).nothing  # noqa: B018
    assert not hasattr(trainer.Model(nn.Dense(1)), "fit_generator")


@pytest.mark.slow
def test_hooks_that_can_be_called_are_called():
    called = []

    class Own(trainer.callbacks.Callback):
        def on_epoch_end(self, *arguments):
            called.append("epoch")

        def on_train_end(self, log):  # as positional
            called.append("end")

    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    own = Own()
    own.on_train_batch_end = lambda batch, logs: called.append("batch")
    model.fit(X, Y, verbose=0, callbacks=[own])
    assert called == ["batch", "epoch", "end"]
