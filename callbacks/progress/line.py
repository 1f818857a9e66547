"""Display of the progress line: a terminal, a notebook, or none."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from trainer.callbacks.progress.notebook_line import NotebookLine
from trainer.callbacks.progress.terminal_line import BAR_WIDTH, TerminalLine
from trainer.core.ambient.interactive_logging import is_interactive_logging_enabled
from trainer.core.ambient.notebook import is_in_notebook

if TYPE_CHECKING:
    from rich.console import Console


def open_line(console: Console | None = None, bar_width: int = BAR_WIDTH) -> TerminalLine | NotebookLine | None:
    """Returns a line to draw; None if only whole lines should be printed.

    Args:
      console: rich console of the line; by default the notebook's cell, or standard output if it is a terminal.
      bar_width: number of characters of the bar.
    """
    if not is_interactive_logging_enabled():
        return None
    if "CI" in os.environ:  # some CI systems offer a terminal, or colours, but keep a file
        return None
    if console is None:
        if is_in_notebook():
            return NotebookLine(bar_width)
        if not sys.stdout.isatty():
            return None
        from rich.console import Console

        console = Console(file=sys.stdout)
    return TerminalLine(console, bar_width) if console.is_interactive else None
