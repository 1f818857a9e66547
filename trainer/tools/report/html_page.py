"""A report as a single HTML file, by the template `page.html.jinja` beside this file."""

from __future__ import annotations

import base64
import html
import itertools
import os
import re
from collections.abc import Iterator, Sequence

from trainer.tools.report.page import UNKNOWN, Page, Picture, Table

_NUMBER = re.compile(r"-?[\d.,]+(e[-+]?\d+)?( ?%| [a-zA-Z]+( \d+ [a-z]+)?)?")


class HtmlPath(str):
    """The path of a report; as the value of a cell, a notebook shows the report.

    Args:
      path: the path, as text.
      content: the text of the file.
    """

    def __new__(cls, path: str, content: str = "") -> HtmlPath:
        made = super().__new__(cls, path)
        made._content = content
        return made

    _content: str

    def _repr_html_(self) -> str:
        # Of its own style sheet, in a frame: notebooks have theirs.
        return (f'<iframe srcdoc="{html.escape(self._content)}" style="width:100%;height:640px;border:0"></iframe>')


def as_html(page: Page, footer: str) -> str:
    """Returns a report as the text of an HTML file."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(os.path.dirname(__file__)), autoescape=True,
                                     trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters.update(number_columns=_number_columns, runs_of_tables=_runs_of_tables,
                               base64=lambda data: base64.b64encode(data).decode())
    return environment.get_template("page.html.jinja").render(page=page, footer=footer)


def _number_columns(table: Table) -> set[int]:
    """Returns which columns are of numbers; the first names the rows."""
    return {index for index, column in enumerate(zip(*table.rows, strict=True))
            if index > 0 and any(column) and all(map(_is_number, column))}


def _runs_of_tables(
    parts: Sequence[Table | Picture | str],
) -> Iterator[tuple[bool, Iterator[Table | Picture | str]]]:
    """Yields the parts in order; neighbouring tables come together."""
    return itertools.groupby(parts, lambda part: isinstance(part, Table))


def _is_number(cell: str) -> bool:
    """Returns whether a cell is empty, or a number, possibly with a unit, such as "1.5 KiB", "12.0%" or "1 min 5 s"."""
    return cell in ("", UNKNOWN) or _NUMBER.fullmatch(cell) is not None
