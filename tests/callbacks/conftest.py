"""A clock that stands still, and terminals."""

import io
import sys

import pytest
from rich.console import Console

from tests.support.clock import StandingClock
from tests.support.screen import Terminal
from trainer.callbacks.progress import pace, progress_bar


@pytest.fixture
def clock(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(pace, "time", clock)
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


@pytest.fixture
def screen(monkeypatch):
    """A terminal 120 columns wide."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = io.StringIO()
    screen.console = Console(file=screen, force_terminal=True, color_system=None, width=120)
    return screen


@pytest.fixture
def as_terminal(screen, monkeypatch):
    """Returns a function that gives the terminal that `sys.stdout` and `sys.stderr` are from then on."""
    def made():  # pytest sets them when a test begins
        terminal = Terminal()
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    return made
