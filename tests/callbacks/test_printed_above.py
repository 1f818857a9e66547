"""What other code writes while a bar is drawn: above it, and the streams are given back however the run ends."""

import logging
import sys

import numpy as np
import pytest
from flax import linen as nn

from tests.support.screen import callback_list, fit, text_rows
from trainer import Model
from trainer.callbacks import LambdaCallback


def test_prints_go_above_the_bar(clock, as_terminal):
    terminal = as_terminal()
    callbacks = callback_list(steps=4)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    print("one", "two")
    callbacks.on_execution_end("train", 0, {"loss": 0.5})
    print("par", end="")
    callbacks.on_execution_end("train", 1, {"loss": 0.5})
    print("tial\nthree")
    print("a warning", file=sys.stderr)
    assert text_rows(terminal)[:4] == ["one two", "partial", "three", "a warning"]
    assert text_rows(terminal)[4].startswith(f"Epoch 1/1 {'━' * 20} 2/4")
    callbacks.on_epoch_end(0, {"loss": 0.5})
    assert sys.stdout is sys.stderr is terminal
    print("between")
    callbacks.on_train_end()
    assert text_rows(terminal)[4].endswith("4 - loss: 0.5000 - 0s - 0us/step")
    assert text_rows(terminal)[5] == "between"


@pytest.mark.slow
def test_a_run_that_fails_gives_the_streams_back(as_terminal):
    terminal = as_terminal()
    model = Model(nn.Dense(1))
    model.compile("sgd", "mse")
    x = np.zeros((4, 1), np.float32)

    def fail(*_, **__):
        print("unfinished", end="")
        raise OverflowError

    for name, run in {"on_train_batch_end": model.fit, "on_test_batch_end": model.evaluate}.items():
        with pytest.raises(OverflowError):
            run(x, x, callbacks=[LambdaCallback(**{name: fail})])
        assert sys.stdout is sys.stderr is terminal
        assert terminal.getvalue().endswith("unfinished")


def test_log_records_of_handlers_that_were_there_before_go_above_the_bar(clock, as_terminal):
    terminal = as_terminal()
    handler = logging.StreamHandler()
    logger = logging.getLogger("tests.of_a_user")
    logger.addHandler(handler)
    try:
        callbacks = callback_list(steps=4)
        callbacks.on_train_begin()
        callbacks.on_epoch_begin(0)
        logger.warning("of before")
        callbacks.on_execution_end("train", 0, {"loss": 0.5})
        assert text_rows(terminal)[0] == "of before" and text_rows(terminal)[1].startswith("Epoch 1/1")
        callbacks.on_epoch_end(0, {"loss": 0.5})
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)


def test_a_handler_that_chooses_its_stream_by_itself_is_left_alone(clock, as_terminal):
    class Handler(logging.StreamHandler):
        def __init__(self):
            logging.Handler.__init__(self)

        @property
        def stream(self):
            return sys.stderr

    as_terminal()
    logger, handler = logging.getLogger("tests.of_a_user"), Handler()
    logger.addHandler(handler)
    try:
        fit(callback_list(), clock)
    finally:
        logger.removeHandler(handler)


def test_what_follows_an_exception_begins_a_new_line(clock, as_terminal):
    terminal = as_terminal()
    callbacks = callback_list()
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 4, {"loss": 0.5})
    callbacks.release()
    print("Traceback")
    assert text_rows(terminal)[0].startswith("Epoch 1/1") and text_rows(terminal)[1] == "Traceback"


def test_a_bar_of_other_code_is_passed_through(clock, as_terminal):
    terminal = as_terminal()
    callbacks = callback_list()
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    print("\r 50%", end="", file=sys.stderr)
    assert terminal.getvalue().endswith("\r 50%")
    callbacks.release()
