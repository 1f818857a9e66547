"""One line of a terminal that is drawn over and over.

Owns the control codes and the bar's form. It keeps no thread, hides no cursor and redirects no output, so that an
exception, or a callback that prints, leaves nothing to restore. rich's `Live` and `Progress` hide the cursor until they
are stopped, and a `fit` that ends by an exception calls no hook that would stop them; so only rich's console is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_BAR_WIDTH = 20


class TerminalLine:
    """Draws a title, a bar and texts into the current line of a rich console.

    Args:
      console: the console; it must be a terminal.

    Example:

    >>> import io
    >>> from rich.console import Console
    >>> screen = io.StringIO()
    >>> line = TerminalLine(Console(file=screen, force_terminal=True, color_system=None, width=80))
    >>> line.draw("Epoch 1/3", 5, 10, ["loss: 0.2500"], final=True)
    >>> screen.getvalue().endswith("Epoch 1/3 ━━━━━━━━━━━━━━━━━━━━ 5/10 - loss: 0.2500\\n")
    True
    """

    def __init__(self, console: Console):
        self._console = console

    def draw(self, title: str, step: int, steps: int | None, texts: list[str], final: bool = False) -> None:
        """Replaces the line by this text; a final line stays, and may be longer than the terminal is wide.

        Args:
          title: what comes first.
          step: how many steps have been taken.
          steps: how many there are; None if that is unknown, and then there is no bar.
          texts: what follows, with dashes between.
          final: whether the line is done with.
        """
        from rich.control import Control
        from rich.segment import ControlType
        from rich.text import Text

        count = (f"{step}/{steps or '?'}", "bold")
        bar = self._bar(step, steps) if steps else []
        line = Text.assemble(f"{title} ", *bar, count, "".join(f" - {text}" for text in texts))
        if not final:
            line.truncate(self._console.width - 1)  # a full line would make the terminal begin another one
        with self._console:  # in one write, so that nothing flickers
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._console.print(line, end="\n" if final else "", soft_wrap=True, highlight=False)

    def _bar(self, step: int, steps: int) -> list[tuple[str, str]]:
        done_mark, open_mark = "=-" if self._console.options.ascii_only else "━━"
        done = min(_BAR_WIDTH * step // steps, _BAR_WIDTH)
        return [(done_mark * done, "green"), (open_mark * (_BAR_WIDTH - done), "dim"), (" ", "")]
