"""Where progress can be drawn: a terminal, a notebook, or nowhere."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from trainer.callbacks.base.interactive_logging import is_interactive_logging_enabled
from trainer.callbacks.progress.notebook_line import NotebookLine, is_in_notebook
from trainer.callbacks.progress.terminal_line import BAR_WIDTH, TerminalLine

if TYPE_CHECKING:
    from rich.console import Console


def open_line(console: Console | None = None, bar_width: int = BAR_WIDTH) -> TerminalLine | NotebookLine | None:
    """Returns a line to draw; None where only whole lines should be printed.

    Args:
      console: the rich console to draw it in; by default a notebook's cell, or standard output, if it is a terminal.
      bar_width: how many characters its bar has.
    """
    if not is_interactive_logging_enabled():
        return None
    if "CI" in os.environ:  # some CI systems offer a terminal, or colours, to what becomes a file
        return None
    if console is None:
        if is_in_notebook():
            return NotebookLine(bar_width)
        if not sys.stdout.isatty():
            return None
        from rich.console import Console

        console = Console(file=sys.stdout)
    return TerminalLine(console, bar_width) if console.is_interactive else None
