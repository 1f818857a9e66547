"""The progress bar for users' own loops, beside Keras's, and where messages go."""

import logging
import re

import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import trainer
from tests.support.screen import Terminal, shown
from trainer import utils
from trainer.callbacks.progress import progbar
from trainer.callbacks.progress.terminal_line import TerminalLine
from trainer.data.files.folders import LabelledFiles, print_found

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    keras_utils = pytest.importorskip("keras").utils

NAMES = ["loss", "accuracy", "mae"]
VALUES = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(-5, 5).map(lambda value: round(value, 3) + 0.0)),
                  max_size=3, unique_by=lambda pair: pair[0])
UPDATES = st.lists(st.tuples(st.integers(1, 3), VALUES), min_size=1, max_size=5)


class Printed:
    """Takes the place of a function that prints."""

    def __init__(self):
        self.texts = []

    def __call__(self, text, line_break=True):
        self.texts.append(text)


def logs_of(texts):
    """Returns what the last text says of values, and how many steps it says have been taken."""
    text = re.sub(r"\x1b\[\d+m", "", texts[-1])
    values = {name: round(float(value), 4) for name, value in re.findall(r"(\w+): (-?[\d.]+(?:e[-+]\d+)?)", text)}
    return re.search(r"(\d+)/\d+", text)[1], list(values), pytest.approx(list(values.values()), abs=1.1e-4)


@pytest.mark.slow
@given(updates=UPDATES, kinds=st.sampled_from(["stateful_metrics", "stateless_metrics"]),
       names=st.none() | st.sets(st.sampled_from(NAMES)), verbose=st.sampled_from([1, 2]))
def test_values_are_averaged_as_by_keras(updates, kinds, names, verbose):
    target = sum(steps for steps, _ in updates) + 1
    arguments = {"verbose": verbose, "interval": 0} | ({} if names is None else {kinds: names})
    found = []
    for module, name, kind in ((keras_io(), "print_msg", keras_utils.Progbar),
                               (progbar, "print_message", utils.Progbar)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, name, printed := Printed())
            patched.setattr(progbar, "_LINE_SECS", 0)
            bar = kind(target, **arguments)
            states = []
            for steps, values in updates:
                bar.add(steps, values)
                if printed.texts:
                    states.append(logs_of(printed.texts))
            bar.update(target, updates[-1][1])
            found.append([*states, logs_of(printed.texts)])
    assert [state[:2] for state in found[0]] == [state[:2] for state in found[1]]
    assert all(one[2] == other[2].expected for one, other in zip(*found, strict=True))


def keras_io():
    from keras.src.utils import io_utils

    return io_utils


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, color_system=None, width=120, legacy_windows=False)
    monkeypatch.setattr(progbar, "open_line", lambda console_, width: TerminalLine(console, width))
    return terminal


def test_a_bar_is_drawn_over_and_stays_at_the_end(terminal):
    bar = utils.Progbar(4, width=8, interval=0, unit_name="sample")
    bar.update(1, [("loss", 0.5)])
    assert re.fullmatch(r"━━━━━━━━ 1/4 - loss: 0\.5000 - ETA \ds - .*s/sample", shown(terminal)[0])
    bar.update(4, [("loss", 0.25)])
    assert re.fullmatch(r"━━━━━━━━ 4/4 - loss: 0\.2500 - 0s - .*s/sample", shown(terminal)[0])


def test_states_are_drawn_no_more_often_than_the_interval_says(terminal):
    bar = utils.Progbar(None, interval=3600)
    for step in range(1, 5):
        bar.update(step)
    assert len(shown(terminal)) == 1
    bar.update(5, finalize=True)
    assert shown(terminal)[0].startswith("5/? - ")


def test_in_a_pipe_there_is_one_line(capsys):
    bar = utils.Progbar(3)
    for step in range(3):
        bar.add(1, [("loss", float(step))])
    assert re.fullmatch(r"3/3 - 0s - .*s/step - loss: 2\.0000\n", capsys.readouterr().out)


def test_verbose_0_prints_nothing(capsys):
    utils.Progbar(1, verbose=0).add(1, [("loss", 1.0)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"target": -1}, ValueError, "`target` must be a whole number of at least 0 or None"),
    ({"target": 3, "width": 0}, ValueError, "`width` must be"),
    ({"target": 3, "verbose": 3}, ValueError, "`verbose` must be 0, 1, 2"),
    ({"target": 3, "interval": -1}, ValueError, "`interval` must be"),
    ({"target": 3, "unit_name": 1}, TypeError, "`unit_name` must be text"),
    ({"target": 3, "stateful_metrics": [], "stateless_metrics": []}, ValueError, "cannot be used together"),
])
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        utils.Progbar(**arguments)


# --- where messages go -----------------------------------------------------------------------------------------------


@pytest.fixture
def _to_logging():
    utils.disable_interactive_logging()
    yield
    utils.enable_interactive_logging()


def fit(callbacks=()):
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, callbacks=list(callbacks))
    return model


@pytest.mark.usefixtures("_to_logging")
def test_without_interactive_logging_progress_and_messages_are_log_records(capsys, caplog):
    assert not utils.is_interactive_logging_enabled()
    stop = trainer.callbacks.EarlyStopping("loss", min_delta=10, verbose=1)
    with caplog.at_level(logging.INFO, "trainer"):
        fit([stop]).summary()
        print_found(LabelledFiles(["a", "b"], None, None, None), [], None)
    assert capsys.readouterr().out == ""
    messages = [record.getMessage() for record in caplog.records if record.name == "trainer"]
    assert [message.split(" - ")[0] for message in messages][:2] == ["Epoch 1/2", "Epoch 2/2"]
    assert "early stopping" in " ".join(messages)
    assert "Dense" in messages[-2] and messages[-1] == "Found 2 files."


def test_with_interactive_logging_they_are_printed(capsys, caplog):
    utils.disable_interactive_logging()
    utils.enable_interactive_logging()
    assert utils.is_interactive_logging_enabled()
    with caplog.at_level(logging.INFO, "trainer"):
        fit()
    assert capsys.readouterr().out.startswith("Epoch 1/2 - ")
    assert not [record for record in caplog.records if record.name == "trainer"]


@pytest.mark.usefixtures("_to_logging")
def test_no_bar_is_drawn_in_a_terminal_then(monkeypatch):
    from trainer.callbacks.progress.line import open_line

    terminal = Terminal()
    assert open_line(Console(file=terminal, force_terminal=True)) is None
    utils.enable_interactive_logging()
    monkeypatch.delenv("CI", raising=False)
    assert isinstance(open_line(Console(file=terminal, force_terminal=True)), TerminalLine)
