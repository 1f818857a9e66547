"""Errors show the user's own lines, and say what there is to do where memory runs out."""

import importlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored
from trainer.core.calls import tracebacks
from trainer.core.errors import missing_package
from trainer.engine.step.compiled_phase import CompiledPhase

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


class Mismatched(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x) @ jnp.ones((5, 1))


class MismatchedStep(trainer.Model):
    def train_step(self, state, batch):
        return {"loss": self.loss_of(batch[0])}, state

    def loss_of(self, x):
        return (x @ jnp.ones((5, 1))).mean()


class Raising(trainer.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyError(epoch)


@pytest.fixture(params=["auto"], autouse=True)
def filtering(request):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", request.param)
    yield
    jax.config.update("jax_traceback_filtering", before)


def model_of(module, model_class=trainer.Model):
    model = model_class(module)
    model.compile("sgd", "mse")
    return model


def frames_of(call):
    """Returns the functions on the traceback of a call's error, and on that of its cause."""
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError)) as raised:
        call()
    error = raised.value
    causes = [] if error.__cause__ is None else [error.__cause__]
    return [[frame.name for frame in traceback.extract_tb(each.__traceback__)] for each in (error, *causes)]


def strategy_runs(function):
    with mirrored(2).scope():
        return trainer.distribute.get_strategy().run(function, args=(jnp.ones((2, 2)),))


HERE = ["frames_of", "<lambda>"]
ERRORS = {
    "a module": (lambda: model_of(Mismatched()).fit(X, Y, verbose=0), [[*HERE, "_make"], ["__call__"]]),
    "a step": (lambda: model_of(nn.Dense(1), MismatchedStep).fit(X, Y, verbose=0), [[*HERE, "train_step", "loss_of"]]),
    "a loss": (lambda: model_of(nn.Dense(1)).evaluate(X, Y[:, [0, 0]], verbose=0),
               [[*HERE, "check_same_shape"]]),
    "a callback": (lambda: model_of(nn.Dense(1)).fit(X, Y, verbose=0, callbacks=[Raising()]),
                   [[*HERE, "on_epoch_end"]]),
    "a call": (lambda: model_of(Mismatched())(X), [[*HERE, "_make"], ["__call__"]]),
    "strategy.run": (lambda: strategy_runs(lambda x: x @ jnp.ones(3)), [[*HERE, "strategy_runs", "<lambda>"]]),
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_shows_the_users_lines_and_who_raised_it(case):
    call, expected = ERRORS[case]
    assert frames_of(call) == expected


def without_package():
    try:
        importlib.import_module("no_such_package")
    except ImportError as error:
        raise missing_package("this", "no_such_package", "none") from error


def fault():
    return None + 1


@pytest.mark.parametrize(("raised_in", "call", "expected"), [
    ("trainer", without_package, True), ("users", without_package, False), ("trainer", fault, False)])
def test_a_message_says_all_if_the_trainer_raised_the_error_on_purpose(monkeypatch, raised_in, call, expected):
    if raised_in == "trainer":  # the functions of this file count as its own
        monkeypatch.setattr(tracebacks, "_ours", lambda: __file__)
        monkeypatch.setattr(tracebacks, "_hidden", lambda: (__file__,))
    with pytest.raises(Exception) as raised:
        call()
    assert tracebacks.says_all(raised.value) == expected


@pytest.mark.parametrize("filtering", ["off"], indirect=True)
def test_all_frames_are_shown_on_request():
    names = frames_of(ERRORS["a module"][0])[0]
    assert names[:2] == HERE
    assert len(names) > 5


def test_an_error_of_the_data_shows_the_users_lines():
    model = model_of(nn.Dense(1))

    def batches():
        yield X, Y
        raise KeyError("file")

    assert frames_of(lambda: model.fit(batches(), verbose=0)) == [[*HERE, "_draw"], ["batches"]]


@pytest.mark.parametrize(("keyword", "hint"), [
    ("lr", r"Give it to the optimizer: `optimizer=trainer.optimizers.Adam\(learning_rate=...\)`"),
    ("metric", "Did you mean 'metrics'"),
])
def test_an_unknown_keyword_names_what_could_be_meant(keyword, hint):
    with pytest.raises(TypeError, match=f"`Model.compile` has no argument '{keyword}'. {hint}"):
        trainer.Model(nn.Dense(1)).compile("sgd", "mse", **{keyword: 0.1})


def test_an_unknown_keyword_of_an_inherited_method_names_the_class_that_users_know():
    class Mine(trainer.Model):
        pass

    for made in (trainer.Model, Mine):
        with pytest.raises(TypeError, match=r"`Model.summary` has no argument 'expand_nested'"):
            made(nn.Dense(1)).summary(expand_nested=True)
    with pytest.raises(TypeError, match=r"`Model.fit` has no argument 'workers'. Give it to the data: .*PyDataset"):
        trainer.Model(nn.Dense(1)).fit(X, Y, workers=3)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("method", "text"), [
    ("fit", "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), ("predict", "RESOURCE_EXHAUSTED: 9 bytes."),
    ("fit", "INTERNAL: Error dispatching computation: Out of memory allocating 9 bytes.")])
def test_an_error_of_memory_says_what_there_is_to_do(monkeypatch, method, text):
    def run(*args):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(CompiledPhase, "_run", run)
    model = model_of(nn.Dense(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="9 bytes") as raised:
        getattr(model, method)(X, *([Y] if method == "fit" else []), verbose=0)
    notes = "".join(raised.value.__notes__)
    for word in ("batch_size", "microbatches", "remat", "precision", "data_on_device=False", "FullyShardedStrategy",
                 "strategy.explain"):
        assert notes.count(word) == 1
