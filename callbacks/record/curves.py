"""Curves of a history: an axis for each metric, with its training and validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.core.errors import brief, unknown_name, wrong_type

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 3
AXIS_INCHES = (4.2, 2.8)
TRAINING_COLOR, VALIDATION_COLOR = "#1f6fb4", "#d9722b"
_MAX_MARKED = 30  # points of a curve that get a mark each


def curves(history: Mapping[str, Sequence[Any]], epochs: Mapping[str, Sequence[int]],
           metrics: Sequence[str] | None = None) -> Figure:
    """Returns a matplotlib figure, which `figure.savefig("curves.png")` writes, and notebooks show.

    Args:
      history: values of each log; non-numeric logs are skipped.
      epochs: epochs of these values, from 0.
      metrics: names of metrics, without "val_"; None for all.

    Raises:
      ImportError: if matplotlib is not installed.
      TypeError: if a metric is not a string.
      ValueError: if the history lacks a metric, or has no numbers.
    """
    for metric in metrics or ():
        if not isinstance(metric, str):
            raise wrong_type("metrics", metric,
                             'names, each an argument of its own, such as `plot("loss", "accuracy")`')
    try:
        from matplotlib.ticker import MaxNLocator

        from trainer.callbacks.record.notebook_figure import NotebookFigure
    except ImportError as error:
        raise ImportError("To plot a history, matplotlib is needed, which cannot be imported. Install it with "
                          "`pip install 'trainer-jax[plot]'`.") from error
    names = metric_names(history)
    for metric in metrics or ():
        if metric not in names and metric in history and metric.removeprefix("val_") in names:
            training = metric.removeprefix("val_")
            raise ValueError(f"{metric!r} has no axis of its own: it is drawn with {training!r}. Call "
                             f"`plot({training!r})`.")
        if metric not in names:
            raise unknown_name("metric", metric, names)
    shown = list(metrics) if metrics is not None else names
    if not shown:
        raise ValueError("The history has no numbers to plot. Call `fit` with at least one epoch before.")
    columns = min(len(shown), MAX_COLUMNS)
    rows = math.ceil(len(shown) / columns)
    figure = NotebookFigure(figsize=(AXIS_INCHES[0] * columns, AXIS_INCHES[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, metric in zip(axes.flat, shown, strict=False):
        _draw(axis, metric, history, epochs)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in list(axes.flat)[len(shown):]:
        axis.set_visible(False)
    return figure


def metric_names(history: Mapping[str, Sequence[Any]]) -> list[str]:
    """Returns the names of the numeric metrics, without "val_", the loss first.

    >>> metric_names({"accuracy": [1.0], "loss": [0.5], "val_loss": [0.5], "note": ["text"]})
    ['loss', 'accuracy']
    """
    names = dict.fromkeys(name.removeprefix("val_") for name, values in history.items()
                          if len(values) and all(map(_is_number, values)))
    return sorted(names, key=lambda name: name != "loss")


def _draw(axis: Any, metric: str, history: Mapping[str, Sequence[Any]], epochs: Mapping[str, Sequence[int]]) -> None:
    for name, label, color in ((metric, "training", TRAINING_COLOR),
                               (f"val_{metric}", "validation", VALIDATION_COLOR)):
        values = history.get(name)
        if values is None or not all(map(_is_number, values)):
            continue
        x = [epoch + 1 for epoch in epochs[name]]
        y = np.array([math.nan if value is None else value for value in values], float)
        axis.plot(x, y, label=label, color=color, marker="o" if len(x) <= _MAX_MARKED else None, markersize=3,
                  linewidth=1.5)
    axis.set_title(brief(metric), parse_math=False)  # "$" is not a formula
    axis.set_xlabel("epoch")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if f"val_{metric}" in history:
        axis.legend(frameon=False)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
