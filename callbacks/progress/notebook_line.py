"""Lines in the output of a notebook's cell, of which the last is redrawn in place."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from trainer.callbacks.progress.terminal_line import BAR_WIDTH
from trainer.core.ambient import notebook

MAX_LINES = 50  # of an output, which is sent as a whole whenever it changes
# Text and background have the notebook's colors, light or dark.
_BLOCK = "font:13px/1.6 ui-monospace,Menlo,Consolas,monospace"
_LINE = "display:flex;flex-wrap:wrap;align-items:center;gap:0 1.2em"
_TRACK = ("display:inline-block;width:12em;height:0.55em;background:rgba(128,128,128,0.28);border-radius:3px;"
          "overflow:hidden")


class NotebookLine:
    """Draws the content of `TerminalLine` in one replaceable output of a cell; the browser wraps long lines.

    Final lines stay above the next in the same output, so that a `fit` has one output however many epochs it has; after
    `MAX_LINES` lines, it begins another.

    Args:
      bar_width: number of characters of the bar.
    """

    def __init__(self, bar_width: int = BAR_WIDTH) -> None:
        self._bar_width = bar_width
        self._output: Any = None
        self._final: list[tuple[str, str]] = []  # lines as text and as HTML

    def draw(self, title: str, step: int, steps: int | None, logs: Sequence[str], timings: Sequence[str] = (),
             final: bool = False) -> None:
        """See `TerminalLine.draw`."""
        done = min(self._bar_width * step // steps, self._bar_width) if steps else 0
        bar = f"{'█' * done}{'░' * (self._bar_width - done)} " if steps else ""
        text = " - ".join([f"{title}{title and ' '}{bar}{step}/{steps or '?'}", *logs, *timings])
        self._show((text, as_html(title, step, steps, logs, timings)), final)

    def write(self, text: str) -> None:
        """Adds a line of text, which stays."""
        self._show((text, f'<div style="opacity:0.65">{html.escape(text)}</div>'), final=True)

    def _show(self, line: tuple[str, str], final: bool) -> None:
        if len(self._final) == MAX_LINES:
            self._output, self._final = None, []
        texts, divisions = zip(*self._final, line, strict=True)
        content = {"text/plain": "\n".join(texts), "text/html": f'<div style="{_BLOCK}">{"".join(divisions)}</div>'}
        if self._output is None:
            self._output = notebook.display(content)
        else:
            self._output.update(content, raw=True)
        if final:
            self._final.append(line)


def as_html(title: str, step: int, steps: int | None, logs: Sequence[str], timings: Sequence[str] = ()) -> str:
    """Returns the line as HTML: a colored bar, and lines that break only between logs.

    >>> as_html("Epoch 1/3", 5, 10, ["loss: 0.5"])[-66:]
    '<b>5/10</b><span style="white-space:nowrap">loss: 0.5</span></div>'
    """
    share = min(step / steps, 1.0) if steps else 0.0
    color = "#1f9d55" if share == 1.0 else "#1f6fb4"
    bar = (f'<span style="{_TRACK}"><span style="display:block;height:100%;width:{share:.1%};background:{color}">'
           "</span></span>" if steps else "")
    spans = [f'<span style="white-space:nowrap">{html.escape(log)}</span>' for log in logs]
    spans += [f'<span style="white-space:nowrap;opacity:0.65">{html.escape(timing)}</span>' for timing in timings]
    return (f'<div style="{_LINE}"><span>{html.escape(title)}</span>{bar}<b>{step}/{steps or "?"}</b>'
            f'{"".join(spans)}</div>')
