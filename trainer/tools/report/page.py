"""What a report is made of, whatever it is written as: sections of tables, figures and texts."""

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
      caption: a line on it.
      is_code: whether cells are set in a font of equal widths.
    """

    rows: Sequence[Sequence[str]]
    heading: Sequence[str] | None = None
    caption: str = ""
    is_code: bool = False


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure of matplotlib.

    Attributes:
      name: a name for a file, such as "curves".
      alt: what it shows, for those who cannot see it.
      figure: the figure.
    """

    name: str
    alt: str
    figure: Figure

    def as_svg(self) -> bytes:
        """Returns it as an SVG file."""
        return self._saved("svg")

    def as_png(self) -> bytes:
        """Returns it as a PNG file."""
        return self._saved("png")

    def _saved(self, kind: str) -> bytes:
        import matplotlib

        file = io.BytesIO()
        # The same bytes for the same figure: no date, and no random names.
        undated = {"Date": None} if kind == "svg" else None
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(file, format=kind, dpi=PNG_DOTS_PER_INCH, metadata=undated)
        return file.getvalue()


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page under a heading.

    Attributes:
      title: the heading.
      parts: what it has; a str is a paragraph.
    """

    title: str
    parts: Sequence[Table | Picture | str]


@dataclasses.dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
      title: the heading of all.
      status: how the run ended, in a word.
      facts: the most important numbers, with their names.
      sections: the rest.
    """

    title: str
    status: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
