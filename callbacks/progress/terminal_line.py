"""A line of a terminal that is redrawn in place.

Owns the control codes and the form of the bar. It has no thread and hides no cursor, so an exception leaves nothing to
restore. rich's `Live` and `Progress` hide the cursor until they stop; therefore only rich's console is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 20


class TerminalLine:
    """Draws a title, a bar and texts at the end of a rich console's output.

    A narrow terminal drops the timings first, from the last to the first, then the bar. Logs are never dropped, but
    wrap to another line. Lines beyond the terminal's height are hidden until the final state.

    Args:
      console: console of the line; must be a terminal.
      bar_width: number of characters of the bar.

    Example:

    >>> import io
    >>> from rich.console import Console
    >>> screen = io.StringIO()
    >>> line = TerminalLine(Console(file=screen, force_terminal=True, color_system=None, width=80))
    >>> line.draw("Epoch 1/3", 5, 10, ["loss: 0.2500"], ["1s"], final=True)
    >>> screen.getvalue().endswith("Epoch 1/3 ━━━━━━━━━━━━━━━━━━━━ 5/10 - loss: 0.2500 - 1s\\n")
    True
    """

    def __init__(self, console: Console, bar_width: int = BAR_WIDTH):
        self._console = console
        self._bar_width = bar_width
        self._lock = threading.RLock()  # code of the user's may print in other threads
        self._rows = 0  # of the terminal that are drawn on
        self._drawn: tuple[str, int, int | None, Sequence[str], Sequence[str]] | None = None

    def draw(self, title: str, step: int, steps: int | None, logs: Sequence[str], timings: Sequence[str] = (),
             final: bool = False) -> None:
        """Replaces the previous state of the line.

        Args:
          title: first text.
          step: number of steps so far.
          steps: total number of steps; None if unknown, which draws no bar.
          logs: texts after the steps, separated by dashes.
          timings: texts after the logs.
          final: whether the line stays, with all timings, and the next line is drawn below.
        """
        from rich.cells import cell_len
        from rich.text import Text

        head = f"{title}{title and ' '}", f"{step}/{steps or '?'}"
        width = self._console.width - 1  # after a full line, the terminal would begin another line
        bar = self._bar(step, steps) if steps else []
        timings = list(timings)

        def lines() -> list[str]:
            first = "".join((head[0], *(mark for mark, _ in bar), head[1]))
            return _wrapped(first, [*logs, *timings], width, cell_len)

        while not final and timings and len(lines()) > 1:
            timings.pop()
        if len(lines()) > 1 or cell_len(lines()[0]) > width:
            bar = []
        first, *others = lines() if final else self._fitting(lines())
        rest = first.removeprefix("".join((head[0], *(mark for mark, _ in bar), head[1])))
        text = Text.assemble(head[0], *bar, (head[1], "bold"), rest, *(f"\n{line}" for line in others))
        with self._lock, self._console:  # in one write, so that nothing flickers
            self._erase()
            self._console.print(text, end="\n" if final else "", soft_wrap=True, highlight=False)
            self._rows = 0 if final else sum(map(self._height, (first, *others)))
            self._drawn = None if final else (title, step, steps, logs, timings)

    def above(self, write: Callable[[str], Any], text: str) -> None:
        """Writes a text to the terminal, above the drawn line.

        Args:
          write: function that writes.
          text: whole lines.
        """
        with self._lock:
            with self._console:
                self._erase()
            write(text)
            if self._drawn is not None:
                self.draw(*self._drawn)

    def end(self) -> None:
        """Keeps the drawn line; later output begins a new line."""
        with self._lock:
            if self._rows:
                self._console.print()
            self._rows, self._drawn = 0, None

    def _fitting(self, lines: list[str]) -> list[str]:
        """Returns as many lines as the terminal has rows, because scrolled lines cannot be redrawn."""
        rows = self._console.height - 1
        if sum(map(self._height, lines)) <= rows:
            return lines
        kept = lines[:-1]
        while len(kept) > 1 and sum(map(self._height, kept)) + 1 > rows:
            kept = kept[:-1]
        return [*kept, "  ..."]

    def _height(self, line: str) -> int:
        from rich.cells import cell_len

        return max(-(-cell_len(line) // self._console.width), 1)

    def _erase(self) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        if not self._rows:
            return
        erase = ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)
        self._console.control(Control(*erase, *((ControlType.CURSOR_UP, 1), *erase) * (self._rows - 1)))
        self._rows = 0

    def _bar(self, step: int, steps: int) -> list[tuple[str, str]]:
        done_mark, open_mark = "=-" if self._console.options.ascii_only else "━━"
        done = min(self._bar_width * step // steps, self._bar_width)
        return [(done_mark * done, "green"), (open_mark * (self._bar_width - done), "dim"), (" ", "")]


def _wrapped(line: str, texts: Sequence[str], width: int, length: Callable[[str], int] = len) -> list[str]:
    """Returns a line and texts, separated by dashes, wrapped into lines that cut no text.

    Args:
      line: first line.
      texts: texts after the first line.
      width: maximum length of a line.
      length: function that returns the length of a text.

    >>> _wrapped("Epoch 1/3", ["loss: 0.5", "accuracy: 0.7"], 24)
    ['Epoch 1/3 - loss: 0.5', '  accuracy: 0.7']
    """
    lines = [line]
    for text in texts:
        longer = f"{lines[-1]} - {text}"
        if length(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {text}")
    return lines
