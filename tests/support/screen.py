"""Terminals that tests write to, and their final texts."""

import io
import re
import sys
from types import SimpleNamespace

from trainer.callbacks import CallbackList, ProgbarLogger

LOGS = {"accuracy": 0.9, "loss": 0.1, "val_loss": 0.00012}


def shown(screen):
    """Returns the lines that a terminal ends up showing, and forgets them."""
    text = screen.getvalue()
    screen.seek(0)
    screen.truncate()
    return [line for line in rows(text) if line]


def rows(text, width=500):
    """Returns the rows of a terminal on which a text was written."""
    rows, row = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[2K|\x1b\[1A|[^\r\n\x1b]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part != "\r":
            rows[row] += part
            while len(rows[row]) > width:
                rows[row], rest = rows[row][:width], rows[row][width:]
                row += 1
                rows[row:] = [rest]
    return rows


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Cell:
    """The cell of a notebook, which keeps all states of each of its outputs, by MIME types."""

    def __init__(self):
        self.outputs = []

    @classmethod
    def installed(cls, monkeypatch):
        """Returns a cell in which the test runs, until `monkeypatch` is undone."""
        cell = cls()
        monkeypatch.delenv("CI", raising=False)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(
            display=SimpleNamespace(display=cell._display),
            get_ipython=lambda: SimpleNamespace(kernel=object())))
        return cell

    def _display(self, content, raw, display_id):
        states = [content]
        self.outputs.append(states)
        return SimpleNamespace(update=lambda content, raw: states.append(content))


def text_rows(terminal):
    return [row for row in rows(re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())) if row]


def callback_list(bar=None, verbose=1, epochs=1, steps=10):
    return CallbackList([bar or ProgbarLogger()], verbose=verbose, epochs=epochs, steps=steps)


def fit(callbacks, clock, epochs=2, steps=10, fused=5, secs_per_execution=0.5):
    """Calls the hooks that a fit calls."""
    callbacks.on_train_begin()
    for epoch in range(epochs):
        callbacks.on_epoch_begin(epoch)
        for batch in range(fused - 1, steps, fused):
            clock.now += secs_per_execution
            callbacks.on_execution_end("train", batch, {"loss": 0.5})
        callbacks.on_test_begin()
        callbacks.on_execution_end("test", 2, {"loss": 7.0})
        callbacks.on_test_end({"loss": 7.0})
        callbacks.on_epoch_end(epoch, dict(LOGS))
    callbacks.on_train_end(dict(LOGS))
