"""The parts of a report in any format: sections of tables, figures and texts."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DOTS_PER_INCH = 150
UNKNOWN = "\N{EN DASH}"  # a cell without a value


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      rows: the cells of each row, all texts.
      heading: the names of the columns; None for a table whose first column names the rows.
      caption: a line about the table.
      is_code: whether to use a monospaced font.
    """

    rows: Sequence[Sequence[str]]
    heading: Sequence[str] | None = None
    caption: str = ""
    is_code: bool = False


@dataclasses.dataclass(frozen=True)
class Picture:
    """A matplotlib figure.

    Attributes:
      name: a name for a file, such as "curves".
      alt: a description for readers who cannot see the figure.
    """

    name: str
    alt: str
    figure: Figure

    def as_svg(self) -> bytes:
        """Returns the figure as an SVG file."""
        return self._saved("svg")

    def as_png(self) -> bytes:
        """Returns the figure as a PNG file."""
        return self._saved("png")

    def _saved(self, kind: str) -> bytes:
        import matplotlib

        file = io.BytesIO()
        # No date and no random names, so that the same figure gives the same bytes.
        undated = {"Date": None} if kind == "svg" else None
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(file, format=kind, dpi=PNG_DOTS_PER_INCH, metadata=undated)
        return file.getvalue()


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page under a heading.

    Attributes:
      title: the heading.
      parts: the content; a str is a paragraph.
    """

    title: str
    parts: Sequence[Table | Picture | str]


@dataclasses.dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
      title: the main heading.
      status: the outcome of the run, in a word.
      facts: the most important numbers, with their names.
    """

    title: str
    status: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
