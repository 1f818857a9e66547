"""A history as a table, for terminals and notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ROWS = 12
_FIRST_ROWS = 3  # of a longer table, whose other rows are its last


def table_rows(history: Mapping[str, Sequence[Any]], epochs: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Returns the cells of a table: a row of names, then a row for each epoch.

    Args:
      history: values of each log.
      epochs: epochs of these values, from 0. They are displayed from 1, as in progress bars.

    >>> table_rows({"loss": [0.5, 0.25], "val_loss": [0.75]}, {"loss": [0, 1], "val_loss": [1]})
    [['epoch', 'loss', 'val_loss'], ['1', '0.5', ''], ['2', '0.25', '0.75']]
    """
    by_epoch: dict[int, dict[str, str]] = {}
    for name, values in history.items():
        for epoch, value in zip(epochs[name], values, strict=False):
            by_epoch.setdefault(epoch, {})[name] = _cell(value)
    rows = [[str(epoch + 1), *(by_epoch[epoch].get(name, "") for name in history)] for epoch in sorted(by_epoch)]
    if len(rows) > MAX_ROWS:
        left_out = ["..."] * (1 + len(history))
        rows = [*rows[:_FIRST_ROWS], left_out, *rows[_FIRST_ROWS + 1 - MAX_ROWS:]]
    return [["epoch", *history], *rows]


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text with aligned columns.

    >>> print(as_text([["epoch", "loss"], ["1", "0.5"]]))
    epoch  loss
    -----------
        1   0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_html(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML, with the first row as its head.

    >>> as_html([["epoch"], ["1"]])
    '<table><thead><tr><th>epoch</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
