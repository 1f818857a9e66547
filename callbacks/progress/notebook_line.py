"""One line in the output of a notebook's cell that is drawn over and over."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from trainer.callbacks.progress.terminal_line import BAR_WIDTH


class NotebookLine:
    """Draws what `TerminalLine` draws, as an output of a cell that is replaced; a browser wraps long lines.

    Args:
      bar_width: how many characters the bar has.
    """

    def __init__(self, bar_width: int = BAR_WIDTH) -> None:
        self._bar_width = bar_width
        self._output: Any = None

    def draw(self, title: str, step: int, steps: int | None, logs: Sequence[str], timings: Sequence[str] = (),
             final: bool = False) -> None:
        """See `TerminalLine.draw`."""
        done = min(self._bar_width * step // steps, self._bar_width) if steps else 0
        bar = f"{'█' * done}{'░' * (self._bar_width - done)} " if steps else ""
        content = {"text/plain": " - ".join([f"{title}{title and ' '}{bar}{step}/{steps or '?'}", *logs, *timings])}
        if self._output is None:
            display = sys.modules["IPython"].display.display
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


def is_in_notebook() -> bool:
    """Returns whether the program runs in the kernel of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None
