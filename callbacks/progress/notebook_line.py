"""One line in the output of a notebook's cell that is drawn over and over."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_BAR_WIDTH = 20


class NotebookLine:
    """Draws what `TerminalLine` draws, as an output of a cell that is replaced; a browser wraps long lines."""

    def __init__(self) -> None:
        self._output: Any = None

    def draw(self, title: str, step: int, steps: int | None, logs: Sequence[str], timings: Sequence[str] = (),
             final: bool = False) -> None:
        """See `TerminalLine.draw`."""
        done = min(_BAR_WIDTH * step // steps, _BAR_WIDTH) if steps else 0
        bar = f"{'█' * done}{'░' * (_BAR_WIDTH - done)} " if steps else ""
        content = {"text/plain": " - ".join([f"{title} {bar}{step}/{steps or '?'}", *logs, *timings])}
        if self._output is None:
            display = sys.modules["IPython"].display.display
            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


def is_in_notebook() -> bool:
    """Returns whether the program runs in the kernel of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None
