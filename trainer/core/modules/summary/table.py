"""A model's summary as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.core.modules.summary.layers import LayerRow
from trainer.core.units import readable_bytes, readable_number

_SHARDING = "Sharding"
_LEFT = ("Layer", "Type", "Output shape", _SHARDING)  # the other columns hold numbers


def summary_cells(rows: Sequence[LayerRow], name: str) -> list[tuple[str, ...]]:
    """Returns the cells of a table of layers; the first row holds the names of the columns.

    The columns for operations and shardings appear only if they have values.

    >>> summary_cells([LayerRow("head", "Dense", "(None, 2)", 1008, 1008, 4032, 2016.0)], "Net")[1]
    ('head', 'Dense', '(None, 2)', '1,008', '1,008', '3.9 KiB', '2.02 k')
    """
    columns: list[tuple[str, Callable[[LayerRow], str]]] = [
        ("Layer", lambda row: row.path or name), ("Type", lambda row: row.type_name),
        ("Output shape", lambda row: row.output_shape), ("Params", lambda row: f"{row.params:,}"),
        ("Trainable", lambda row: f"{row.trainable:,}"),
        ("Bytes", lambda row: readable_bytes(row.nbytes))]
    if any(row.flops is not None for row in rows):
        columns.append(("FLOPs/row", lambda row: "" if row.flops is None else readable_number(row.flops)))
    if any(row.sharding for row in rows):
        columns.append((_SHARDING, lambda row: row.sharding))
    return [tuple(heading for heading, _ in columns), *(tuple(text(row) for _, text in columns) for row in rows)]


def totals(rows: Sequence[LayerRow], total: int, trainable: int, state_count: int) -> list[str]:
    """Returns the lines below the table; see `render_summary`."""
    flops = [row.flops for row in rows if row.flops is not None]
    return [
        f"Total params: {total:,} ({readable_bytes(sum(row.nbytes for row in rows))})",
        f"Trainable params: {trainable:,}",
        f"Non-trainable params: {total - trainable:,}",
        f"Model state among these: {state_count:,}",
        *([f"Forward pass of these layers: {readable_number(sum(flops))} floating-point operations per row"]
          if flops else []),
    ]


def render_summary(rows: Sequence[LayerRow], name: str, total: int, trainable: int, state_count: int) -> list[str]:
    """Returns a summary as lines of text.

    Args:
      rows: the layers.
      name: name of the model.
      total: number of values in the model: parameters, including frozen parameters, and state.
      trainable: number of trained values.
      state_count: number of values of the state, such as running averages.

    >>> row = LayerRow("head", "Dense", "(None, 2)", 1008, 1008, 4032, 2016.0)
    >>> print("\\n".join(render_summary([row], "Net", 1008, 1008, 0)))
    Model: Net
    Layer  Type   Output shape  Params  Trainable    Bytes  FLOPs/row
    -----------------------------------------------------------------
    head   Dense  (None, 2)      1,008      1,008  3.9 KiB     2.02 k
    -----------------------------------------------------------------
    Total params: 1,008 (3.9 KiB)
    Trainable params: 1,008
    Non-trainable params: 0
    Model state among these: 0
    Forward pass of these layers: 2.02 k floating-point operations per row
    """
    cells = summary_cells(rows, name)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) if heading in _LEFT else cell.rjust(width)
                       for heading, cell, width in zip(cells[0], line, widths, strict=True)).rstrip() for line in cells]
    rule = "-" * max(map(len, lines))
    return [f"Model: {name}", lines[0], rule, *lines[1:], rule, *totals(rows, total, trainable, state_count)]


def print_summary(rows: Sequence[LayerRow], name: str, total: int, trainable: int, state_count: int) -> None:
    """Prints a summary to a terminal, in colors; see `render_summary`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    cells = summary_cells(rows, name)
    table = Table(box=SIMPLE_HEAD, title=f"Model: {name}", title_justify="left", title_style="bold", pad_edge=False)
    for heading in cells[0]:
        is_number = heading not in _LEFT
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number,
                         style="cyan" if heading == "Layer" else "dim" if heading == "Type" else None)
    for line in cells[1:]:
        table.add_row(*line)
    console = Console()
    console.print(table)
    for text in totals(rows, total, trainable, state_count):
        console.print(text, highlight=False)
