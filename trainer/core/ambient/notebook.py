"""Outputs of a notebook's cell: whether there is one, and texts that keep their lines there.

A notebook wraps the long lines of printed text, which breaks tables. IPython is never imported: a kernel has done so.
"""

from __future__ import annotations

import html
import sys
from typing import Any

_PRE = "white-space:pre;overflow-x:auto;line-height:1.3;font-family:monospace"  # wide tables scroll


def is_in_notebook() -> bool:
    """Returns whether the program runs in the kernel of a notebook, such as Jupyter's, VS Code's or Colab's."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def display(content: dict[str, str]) -> Any:
    """Shows an output, and returns a handle whose `update(content, raw=True)` replaces it.

    Args:
      content: the output by MIME types. A notebook shows the richest that it knows.
    """
    return sys.modules["IPython"].display.display(content, raw=True, display_id=True)


def print_table(text: str) -> None:
    """Prints a text with aligned columns; a notebook's cell shows it with its lines as they are.

    Output that is redirected, as by `contextlib.redirect_stdout`, is printed in a notebook too.
    """
    if is_in_notebook() and type(sys.stdout).__name__ == "OutStream":  # of ipykernel
        display({"text/plain": text, "text/html": as_html(text)})
    else:
        print(text, flush=True)


def as_html(text: str) -> str:
    """Returns a text as HTML, whose lines are not wrapped.

    >>> as_html("a < b")[-16:]
    '">a &lt; b</pre>'
    """
    return f'<pre style="{_PRE}">{html.escape(text)}</pre>'


def as_folded_html(title: str, text: str) -> str:
    """Returns HTML that shows a title, and a text when it is clicked.

    It suits the value of a cell whose text the cell has printed already.

    >>> as_folded_html("Plan", "a  b").startswith("<details><summary>Plan</summary><pre")
    True
    """
    return f"<details><summary>{html.escape(title)}</summary>{as_html(text)}</details>"
