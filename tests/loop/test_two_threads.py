"""One model, callback or iterator that two threads use: refused by name, where numbers would be wrong."""

import contextlib
import threading

import numpy as np
import pytest
from flax import linen as nn

import trainer
from trainer import callbacks as cb

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)
Y = X[:, :1]


def small_model(optimizer="sgd"):
    model = trainer.Model(nn.Dense(1), seed=1, name="small")
    model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    return model


@pytest.fixture(scope="module")
def model():
    return small_model()


class Paused(cb.Callback):
    """Stops a run in its first epoch until it is told to go on."""

    def __init__(self):
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.set()
        assert self.goes_on.wait(60)

    on_test_begin = on_predict_begin = lambda self, logs=None: self.on_epoch_begin(0)


@contextlib.contextmanager
def in_another_thread(call):
    """Runs `call(paused)` in a thread, which is in the middle of it inside of the block."""
    paused = Paused()
    thread = threading.Thread(target=call, args=(paused,), name="other")
    thread.start()
    assert paused.begun.wait(60)
    try:
        yield
    finally:
        paused.goes_on.set()
        thread.join()


TRAINING = {
    "fit": lambda model: model.fit(X, Y, batch_size=8, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
}
READING = {
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict": lambda model: model.predict(X, verbose=0),
}
CHANGING = {
    "state": lambda model: setattr(model, "state", model.state),
    "optimizer": lambda model: setattr(model.optimizer, "learning_rate", 0.5),
}


@pytest.mark.parametrize("call", [*TRAINING, *READING, *CHANGING])
def test_a_model_that_another_thread_trains_is_not_used(model, call):
    step = int(model.state.step)
    with (in_another_thread(lambda paused: model.fit(X, Y, batch_size=8, verbose=0, callbacks=[paused])),
          pytest.raises(RuntimeError, match=f"'small' is used by two threads: `{call}` was called in 'MainThread', "
                                            "while `fit` runs in 'other', and its .* See .*errors.html#two-threads ")):
        {**TRAINING, **READING, **CHANGING}[call](model)
    assert int(model.state.step) == step + 2  # and the training has gone on
    TRAINING["fit"](model)


@pytest.mark.parametrize("running", ["evaluate", "predict"])
@pytest.mark.parametrize("call", [*TRAINING, *READING])
def test_a_model_that_another_thread_evaluates_is_not_trained_but_evaluated(model, running, call):
    data = (X, Y) if running == "evaluate" else (X,)
    with in_another_thread(lambda paused: getattr(model, running)(*data, verbose=0, callbacks=[paused])):
        if call in READING:
            READING[call](model)
        else:
            with pytest.raises(RuntimeError, match=f"`{call}` .* while `{running}` runs in 'other', whose weights"):
                TRAINING[call](model)


@pytest.mark.slow
def test_a_callback_may_use_the_model_that_it_trains(model):
    uses = cb.LambdaCallback(on_epoch_end=lambda epoch, logs: [use(model) for use in READING.values()])
    model.fit(X, Y, verbose=0, callbacks=[uses])


@pytest.mark.slow
def test_a_callback_of_two_threads_is_refused(model):
    other, shared = small_model(), cb.EarlyStopping("loss")
    with (in_another_thread(lambda paused: other.fit(X, Y, verbose=0, callbacks=[shared, paused])),
          pytest.raises(RuntimeError, match="`EarlyStopping` is used by two threads: a call in 'other' has it")):
        model.fit(X, Y, verbose=0, callbacks=[cb.TerminateOnNaN(), shared])
    assert shared.model is other
    model.fit(X, Y, verbose=0, callbacks=[shared])
    assert not trainer.callbacks.callback_list._THREADS


def test_an_iterator_that_two_threads_read_is_refused(model):
    other, batches = small_model(), iter([(X, Y)] * 5)
    with (in_another_thread(lambda paused: other.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[paused])),
          pytest.raises(RuntimeError, match="list_iterator of batches is read by two threads: a call in 'other'")):
        model.evaluate(batches, steps=1, verbose=0)
    model.evaluate(batches, steps=1, verbose=0)


@pytest.mark.slow
def test_an_optimizer_of_two_models_keeps_a_state_for_each():
    shared = trainer.optimizers.Adam(0.1)
    first, second, alone = small_model(shared), small_model(shared), small_model(trainer.optimizers.Adam(0.1))
    first.optimizer.learning_rate = 0.7
    with in_another_thread(lambda paused: first.fit(X, Y, batch_size=8, verbose=0, callbacks=[paused])):
        second.fit(X, Y, batch_size=8, verbose=0)
    alone.fit(X, Y, batch_size=8, verbose=0)
    assert float(second.optimizer.learning_rate) == np.float32(0.1)
    for found, expected in zip(second.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)
