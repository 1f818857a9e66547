"""ProgbarLogger: what is printed in a pipe and in a terminal, and how seldom logs are read."""

import io
import re
import subprocess
import sys

import numpy as np
import pytest
from flax import linen as nn
from rich.console import Console

import trainer
from tests.support.screen import Cell, callback_list, fit, rows, shown
from trainer.callbacks import LazyLogs, ProgbarLogger


@pytest.mark.parametrize("steps", [10, None])
@pytest.mark.parametrize("verbose", [1, 2, "auto", True])
def test_in_a_pipe_each_epoch_is_one_line_of_standard_output(capsys, clock, verbose, steps):
    fit(callback_list(verbose=verbose, epochs=2, steps=steps), clock)
    logs = "accuracy: 0.9000 - loss: 0.1000 - val_loss: 1.2000e-04"
    # Five steps in half a second after the first execution, which is left out.
    assert capsys.readouterr().out == f"Epoch 1/2 - 1s - 100ms/step - {logs}\nEpoch 2/2 - 1s - 100ms/step - {logs}\n"


def test_verbose_0_prints_nothing(capsys, clock, screen):
    callbacks = callback_list(ProgbarLogger(screen.console), verbose=0)
    fit(callbacks, clock)
    callbacks.on_test_begin()
    callbacks.on_test_end({"loss": 0.5})
    assert capsys.readouterr().out == screen.getvalue() == ""


def test_verbose_2_prints_whole_lines_in_a_terminal_too(capsys, clock, screen):
    fit(callback_list(ProgbarLogger(screen.console), verbose=2), clock, epochs=1)
    assert screen.getvalue() == ""
    assert capsys.readouterr().out.startswith("Epoch 1/1 - 1s - 100ms/step - accuracy")


def test_ci_gets_whole_lines(capsys, clock, screen, monkeypatch):
    monkeypatch.setenv("CI", "true")
    fit(callback_list(ProgbarLogger(screen.console)), clock, epochs=1)
    assert screen.getvalue() == ""
    assert capsys.readouterr().out.startswith("Epoch 1/1")


@pytest.mark.parametrize(("phase", "line"), [("test", "Evaluate - 2s - 200ms/step - loss: 0.5000\n"),
                                             ("predict", "Predict - 2s - 200ms/step\n")])
def test_evaluate_and_predict_print_one_line(capsys, clock, phase, line):
    callbacks = callback_list()
    getattr(callbacks, f"on_{phase}_begin")()
    clock.now += 2
    callbacks.on_execution_end(phase, 9, {"loss": 0.5})
    getattr(callbacks, f"on_{phase}_end")({"loss": 0.5})
    assert capsys.readouterr().out == line


def test_an_epoch_without_steps_has_no_step_duration(capsys, clock):
    fit(callback_list(epochs=1, steps=0), clock, epochs=1, steps=0)
    assert capsys.readouterr().out.startswith("Epoch 1/1 - 0s - accuracy")


def test_a_run_that_an_exception_ended_does_not_silence_the_next(capsys, clock):
    bar = ProgbarLogger()
    callback_list(bar).on_train_begin()
    callbacks = callback_list(bar)
    callbacks.on_test_begin()
    callbacks.on_test_end({"loss": 0.5})
    assert capsys.readouterr().out == "Evaluate - 0s - loss: 0.5000\n"


def test_in_a_terminal_each_epoch_leaves_one_line(capsys, clock, screen):
    fit(callback_list(ProgbarLogger(screen.console), epochs=2), clock)
    bar = "━" * 20
    logs = "accuracy: 0.9000 - loss: 0.1000 - val_loss: 1.2000e-04 - 1s - 100ms/step"
    assert shown(screen) == [f"Epoch 1/2 {bar} 10/10 - {logs}", f"Epoch 2/2 {bar} 10/10 - {logs}"]
    assert capsys.readouterr().out == ""


def test_the_bar_follows_the_batches(clock, screen):
    callbacks = callback_list(ProgbarLogger(screen.console))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    bar = "━" * 20
    assert shown(screen) == [f"Epoch 1/1 {bar} 0/10 - compiling..."]
    clock.now += 30  # compiling
    callbacks.on_execution_end("train", 0, {"loss": 0.5})
    assert shown(screen) == [f"Epoch 1/1 {bar} 1/10 - ETA 4:30 - 30s/step"]
    clock.now += 2
    callbacks.on_execution_end("train", 2, {"loss": 0.25})
    # The logs are those of the execution before, which ends sooner.
    assert shown(screen) == [f"Epoch 1/1 {bar} 3/10 - loss: 0.5000 - ETA 7s - 1s/step"]
    clock.now += 1
    callbacks.on_execution_end("train", 3, {"loss": 0.125})
    assert shown(screen) == [f"Epoch 1/1 {bar} 4/10 - loss: 0.2500 - ETA 6s - 1s/step"]
    callbacks.on_epoch_end(0, {"loss": 0.2})
    screen.truncate(0)
    callbacks.on_epoch_begin(1)
    assert "compiling" not in shown(screen)[-1]


@pytest.mark.parametrize(("phase", "title", "logs"), [
    ("test", "Evaluate", " - loss: 0.5000"), ("predict", "Predict", "")])
def test_the_bar_of_an_evaluation_or_a_prediction_follows_its_batches(clock, screen, phase, title, logs):
    callbacks = callback_list(ProgbarLogger(screen.console), steps=4)
    getattr(callbacks, f"on_{phase}_begin")()
    callbacks.on_execution_end(phase, 0, {"loss": 0.5})
    clock.now += 1
    callbacks.on_execution_end(phase, 1, {"loss": 0.25})
    assert shown(screen)[-1] == f"{title} {'━' * 20} 2/4{logs} - ETA 2s - 1s/step"


def test_the_done_part_of_the_bar_is_coloured(clock, screen):
    colours = Console(file=screen, force_terminal=True, color_system="standard", width=100)
    callbacks = callback_list(ProgbarLogger(colours))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 2, {})
    assert f"\x1b[32m{'━' * 6}\x1b[0m\x1b[2m{'━' * 14}\x1b[0m" in screen.getvalue()


def test_unknown_steps_are_known_after_the_first_epoch(clock, screen):
    callbacks = callback_list(ProgbarLogger(screen.console), epochs=2, steps=None)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 3, {"loss": 0.5})
    assert shown(screen) == ["Epoch 1/2 4/? - 0us/step"]
    callbacks.on_epoch_end(0, {"loss": 0.5})
    callbacks.on_epoch_begin(1)
    assert shown(screen)[-1] == f"Epoch 2/2 {'━' * 20} 0/4"


BAR = "━" * 20


@pytest.mark.parametrize(("width", "drawn", "final"), [
    (80, [f"Epoch 1/1 {BAR} 5/10 - loss: 0.1000 - accuracy: 0.9000 - ETA 5s"],
     ["Epoch 1/1 5/10 - loss: 0.2000 - accuracy: 0.8000 - 5s - 1s/step"]),
    (70, [f"Epoch 1/1 {BAR} 5/10 - loss: 0.1000 - accuracy: 0.9000"],
     ["Epoch 1/1 5/10 - loss: 0.2000 - accuracy: 0.8000 - 5s - 1s/step"]),
    (60, ["Epoch 1/1 5/10 - loss: 0.1000 - accuracy: 0.9000"],
     ["Epoch 1/1 5/10 - loss: 0.2000 - accuracy: 0.8000 - 5s", "  1s/step"]),
    (40, ["Epoch 1/1 5/10 - loss: 0.1000", "  accuracy: 0.9000"],
     ["Epoch 1/1 5/10 - loss: 0.2000", "  accuracy: 0.8000 - 5s - 1s/step"]),
    (20, ["Epoch 1/1 5/10", "  loss: 0.1000", "  accuracy: 0.9000"],
     ["Epoch 1/1 5/10", "  loss: 0.2000", "  accuracy: 0.8000", "  5s - 1s/step"]),
])
def test_a_narrow_terminal_shows_all_logs_and_fewer_timings(clock, screen, width, drawn, final):
    screen.console.width = width
    callbacks = callback_list(ProgbarLogger(screen.console))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch, loss in ((3, 0.1), (4, 0.5)):
        clock.now += 4 if batch == 3 else 1
        callbacks.on_execution_end("train", batch, {"loss": loss, "accuracy": 1 - loss})
    # A longer line was there before, and nothing of it is left.
    assert [row for row in rows(screen.getvalue()) if row] == drawn
    callbacks.on_epoch_end(0, {"loss": 0.2, "accuracy": 0.8})
    assert shown(screen) == final


def test_a_log_wider_than_the_terminal_is_drawn_over(clock, screen):
    screen.console.width = 30
    callbacks = callback_list(ProgbarLogger(screen.console))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    name = "a_metric_whose_name_takes_more_than_one_row_of_the_terminal"
    for batch in range(6):
        clock.now += 1
        callbacks.on_execution_end("train", batch, {"loss": 0.5, name: 0.25})
    drawn = [row for row in rows(screen.getvalue(), 30) if row]
    assert drawn[0] == "Epoch 1/1 6/10 - loss: 0.5000" and "".join(drawn[1:]) == f"  {name}: 0.2500"


def test_more_logs_than_the_terminal_has_rows_are_cut_until_the_epochs_end(clock, screen):
    screen.console.size = (30, 6)
    logs = {f"log_{number}": float(number) for number in range(9)}
    callbacks = callback_list(ProgbarLogger(screen.console))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch in range(6):
        clock.now += 1
        callbacks.on_execution_end("train", batch, logs)
    drawn = [row for row in rows(screen.getvalue()) if row]
    assert drawn == ["Epoch 1/1 6/10", "  log_0: 0.0000e+00", "  log_1: 1.0000", "  log_2: 2.0000", "  ..."]
    callbacks.on_epoch_end(0, logs)
    assert [row for row in shown(screen) if "log_" in row][-1].startswith("  log_8: 8.0000")


def test_a_long_epoch_leaves_lines_in_a_pipe(capsys, clock):
    callbacks = callback_list(epochs=2, steps=100)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for batch in range(100):
            clock.now += 1
            callbacks.on_execution_end("train", batch, {"loss": 0.5})
        callbacks.on_test_begin()
        for batch in range(40):
            clock.now += 1
            callbacks.on_execution_end("test", batch, {"loss": 7.0})
        callbacks.on_test_end({"loss": 7.0})
        callbacks.on_epoch_end(epoch, {"loss": 0.5})
    train = [f"{step}/100 - ETA {left} - loss: 0.5000" for step, left in ((30, "1:10"), (60, "40s"), (90, "10s"))]
    lines = capsys.readouterr().out.splitlines()
    for epoch, steps in ((1, "?"), (2, 40)):
        assert lines[:5] == [f"Epoch {epoch}/2 - {line}" for line in (
            *train, f"100/100 - validation 20/{steps}", "140s - 1s/step - loss: 0.5000")]
        del lines[:5]


def test_a_validation_is_seen_in_the_bar(clock, screen):
    callbacks = callback_list(ProgbarLogger(screen.console), epochs=1, steps=4)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 3, {"loss": 0.5})
    callbacks.on_test_begin()
    clock.now += 1
    callbacks.on_execution_end("test", 5, {"loss": 7.0})
    assert shown(screen) == [f"Epoch 1/1 {BAR} 4/4 - validation 6/?"]


def test_a_notebook_gets_a_live_bar_in_one_output(capsys, clock, monkeypatch):
    cell = Cell.installed(monkeypatch)
    fit(callback_list(epochs=2), clock)
    states, = cell.outputs
    texts = [state["text/plain"].splitlines() for state in states]
    assert [len(lines) for lines in texts] == [1] * 4 + [2] * 4
    assert texts[1] == [f"Epoch 1/2 {'█' * 10}{'░' * 10} 5/10 - ETA 0s - 100ms/step"]
    assert texts[-1] == [texts[3][0], (
        f"Epoch 2/2 {'█' * 20} 10/10 - accuracy: 0.9000 - loss: 0.1000 - val_loss: 1.2000e-04 - 1s - 100ms/step")]
    for state in states:  # the same words, in HTML
        words = re.sub("<[^>]*>", " ", state["text/html"]).split()
        assert words == [word for word in state["text/plain"].split() if word != "-" and word[0] not in "█░"]
        assert ("width:50.0%" in state["text/html"]) == (f"{'█' * 10}░" in state["text/plain"])
    assert capsys.readouterr().out == ""


def test_each_fit_has_an_output_of_its_own(clock, monkeypatch):
    cell = Cell.installed(monkeypatch)
    bar = ProgbarLogger()
    for _ in range(2):
        fit(callback_list(bar), clock, epochs=1)
    assert [len(states[-1]["text/plain"].splitlines()) for states in cell.outputs] == [1, 1]


def test_a_console_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"`console` must be a `rich.console.Console`. Received: a value of type int"):
        ProgbarLogger(3)


def test_a_terminal_without_unicode_gets_ascii(clock, screen, monkeypatch):
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=ascii_file, force_terminal=True, color_system=None, width=100)
    callbacks = callback_list(ProgbarLogger(console))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 4, {})
    ascii_file.flush()
    assert b"==========---------- 5/10" in ascii_file.buffer.getvalue()


@pytest.mark.parametrize(("verbose", "most"), [(0, 0), (1, 10), (2, 0)])
def test_logs_are_read_at_most_four_times_a_second(clock, screen, verbose, most):
    fetches = []

    def lazy_logs():
        return LazyLogs(["loss"], lambda: fetches.append(clock.now) or {"loss": 0.5})

    callbacks = callback_list(ProgbarLogger(screen.console), verbose=verbose, steps=200)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for batch in range(200):  # in two seconds
        clock.now += 0.01
        callbacks.on_execution_end("train", batch, lazy_logs())
    assert len(fetches) <= most
    assert (verbose == 1) == (len(fetches) >= 7)
    fetches.clear()
    callbacks.on_epoch_end(0, lazy_logs())
    assert len(fetches) == (verbose > 0)


def test_logs_are_awaited_when_the_next_execution_has_begun(clock, screen):
    events = []

    def lazy_logs(batch):
        return LazyLogs(["loss"], lambda: events.append(f"await {batch}") or {"loss": 0.5},
                        lambda: events.append(f"begin {batch}"))

    callbacks = callback_list(ProgbarLogger(screen.console), epochs=2, steps=8)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for batch in range(10 * epoch, 10 * epoch + 8):
            clock.now += 1 / 16
            callbacks.on_execution_end("train", batch, lazy_logs(batch))
    # Those of the first execution at once, and then each quarter of a second.
    assert events == ["begin 0", "begin 1", "await 0", "begin 5", "begin 6", "await 5",
                      "begin 13", "begin 14", "await 13"]


def test_slow_executions_are_counted_at_once(clock, screen):
    callbacks = callback_list(ProgbarLogger(screen.console), epochs=2, steps=3)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        counts = []
        for batch in range(3):
            clock.now += 0.5
            callbacks.on_execution_end("train", batch, {"loss": 0.1 * batch})
            counts.append(shown(screen)[-1].split("━ ")[1])
        assert counts == ["1/3 - ETA 1s - 500ms/step", "2/3 - loss: 0.0000e+00 - ETA 0s - 500ms/step",
                          "3/3 - loss: 0.1000 - ETA 0s - 500ms/step"]


def test_the_time_is_read_after_the_logs_which_wait_for_the_device(capsys, clock):
    def fetch():
        clock.now += 5
        return {"loss": 0.5}

    callbacks = callback_list()
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_execution_end("train", 9)
    callbacks.on_epoch_end(0, LazyLogs(["loss"], fetch))
    assert capsys.readouterr().out == "Epoch 1/1 - 5s - 500ms/step - loss: 0.5000\n"


def test_an_unknown_verbosity_is_refused():
    with pytest.raises(ValueError, match=r"`verbose` must be 0, 1, 2 or 'auto'. Received: verbose=3"):
        callback_list(verbose=3)


@pytest.mark.slow
def test_whole_lines_need_no_rich():
    program = (
        "import sys; from trainer.callbacks import CallbackList\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'rich'] + ['rich']:\n"
        "    sys.modules[name] = None  # makes importing it fail\n"
        "c = CallbackList(add_progbar=True, verbose=1, epochs=1, steps=1)\n"
        "c.on_train_begin(); c.on_epoch_begin(0); c.on_epoch_end(0, {'loss': 0.5}); c.on_train_end()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "Epoch 1/1 - 0s - loss: 0.5000\n"


def test_the_time_of_compilation_is_shown_with_the_first_of_several_sets(capsys):
    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    model = trainer.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    model.evaluate({"first": (x, y), "second": (x, y)}, verbose=2)
    first, second = capsys.readouterr().out.strip().splitlines()
    assert "compiled in" in first and "/step" not in first  # most of its time
    assert "compiled in" not in second and "/step" in second
