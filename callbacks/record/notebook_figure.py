"""A figure that notebooks show."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure of matplotlib that a notebook shows as the value of a cell, whether or not pyplot is imported.

    A plain `Figure` is shown only by a kernel in which pyplot has been set up.
    """

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
