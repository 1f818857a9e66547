"""A progress bar for custom loops, with Keras's texts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.callbacks.progress.line import open_line
from trainer.callbacks.progress.notebook_line import NotebookLine
from trainer.callbacks.progress.progress_text import log_texts, remaining_text, step_duration_text
from trainer.callbacks.progress.terminal_line import BAR_WIDTH, TerminalLine
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message

_LINE_SECS = 30  # between whole lines, where nothing can be drawn


class Progbar:
    """Displays the progress of a loop, and the averages of its values.

    Terminals and notebooks redraw a bar. Elsewhere, as in files and pipes, a line is printed every 30 seconds, or every
    `interval` if it is longer, and at the end.

    Args:
      target: total number of steps; None if unknown.
      width: number of characters of the bar.
      verbose: 1 for a bar, 2 for one line at the end, 0 for no output.
      interval: minimum seconds between two updates of the bar.
      stateful_metrics: names of values that are displayed as last given; others are averaged over steps.
      stateless_metrics: names of values that are averaged; all others are then displayed as last given.
      unit_name: name of a step.

    Raises:
      TypeError: for an argument of a wrong type.
      ValueError: for both `stateful_metrics` and `stateless_metrics`, or numbers out of range.

    Example:

    >>> bar = Progbar(target=2, verbose=2, stateful_metrics=["accuracy"])
    >>> bar.update(1, [("loss", 0.5), ("accuracy", 0.25)])
    >>> bar.add(1, [("loss", 0.25), ("accuracy", 0.75)])  # doctest: +ELLIPSIS
    2/2 - 0s - ...s/step - loss: 0.2500 - accuracy: 0.7500

    Source: https://keras.io/api/utils/python_utils/#progbar-class.
    """

    def __init__(self, target: int | None, width: int = BAR_WIDTH, verbose: int = 1, interval: float = 0.05,
                 stateful_metrics: Iterable[str] | None = None, stateless_metrics: Iterable[str] | None = None,
                 unit_name: str = "step"):
        if stateful_metrics is not None and stateless_metrics is not None:
            raise ValueError("`stateful_metrics` and `stateless_metrics` cannot be used together: all values that one "
                             "of them does not name are of the other kind.")
        arguments.check_count("target", target, 0, optional=True)
        arguments.require_non_negative(interval=interval)
        arguments.require_text(unit_name=unit_name)
        self.target = target
        self.width = arguments.as_count("width", width)
        self.verbose = arguments.check_verbose(verbose)
        self.interval = interval
        self.unit_name = unit_name
        self.stateful_metrics = None if stateless_metrics is not None else set(stateful_metrics or ())
        self.stateless_metrics = None if stateless_metrics is None else set(stateless_metrics)
        self._sums: dict[str, tuple[Any, int]] = {}  # values times steps, and the steps
        self._current = 0
        self._begin = time.perf_counter()
        self._first_end: float | None = None  # of the first step, which may have to compile
        self._shown_at = float("-inf")
        self._line: TerminalLine | NotebookLine | None = None
        self._line_printed_at = self._begin

    def update(self, current: int, values: Iterable[tuple[str, Any]] | None = None,
               finalize: bool | None = None) -> None:
        """Displays the progress after a number of steps.

        Args:
          current: total number of steps so far.
          values: pairs of a name and its value over the steps since the last update. The final update's values are
            displayed unchanged, as in Keras: they are the values of the epoch.
          finalize: whether this is the final update; by default, whether `current` has reached `target`.
        """
        if finalize is None:
            finalize = self.target is not None and current >= self.target
        for name, value in values or ():
            steps = max(current - self._current, 1)
            if finalize or not self._is_averaged(name):
                self._sums[name] = value, 1
            else:
                total, count = self._sums.get(name, (0, 0))
                self._sums[name] = total + value * steps, count + steps
        self._current = current
        now = time.perf_counter()
        secs_per_step = self._secs_per_step(now)
        if current == 1:
            self._first_end = now
        if self.verbose == 1 and (finalize or now - self._shown_at >= self.interval):
            self._show(now, secs_per_step, finalize)
            self._shown_at = now
        elif self.verbose == 2 and finalize and self.target:
            self._print(now, secs_per_step)

    def add(self, n: int, values: Iterable[tuple[str, Any]] | None = None) -> None:
        """Displays the progress after `n` more steps; see `update`."""
        self.update(self._current + n, values)

    def _is_averaged(self, name: str) -> bool:
        if self.stateless_metrics is not None:
            return name in self.stateless_metrics
        return name not in (self.stateful_metrics or ())

    def _secs_per_step(self, now: float) -> float:
        if not self._current:
            return 0.0
        if self._first_end is not None and self._current > 1:
            return (now - self._first_end) / (self._current - 1)
        return (now - self._begin) / self._current

    def _texts(self) -> list[str]:
        return log_texts({name: np.mean(total) / max(count, 1) for name, (total, count) in self._sums.items()})

    def _show(self, now: float, secs_per_step: float, final: bool) -> None:
        if self._line is None:
            self._line = open_line(None, self.width)
        if self._line is None:
            if final or now - self._line_printed_at >= max(_LINE_SECS, self.interval):
                self._line_printed_at = now
                self._print(now, secs_per_step)
            return
        timings = [f"{now - self._begin:.0f}s"]
        if self.target and not final:
            timings = ["ETA " + remaining_text(secs_per_step * max(self.target - self._current, 0))]
        self._line.draw("", self._current, self.target, self._texts(),
                        [*timings, step_duration_text(secs_per_step, self.unit_name)], final)
        if final:
            self._line = None

    def _print(self, now: float, secs_per_step: float) -> None:
        print_message(" - ".join([f"{self._current}/{self.target or '?'}", f"{now - self._begin:.0f}s",
                                  step_duration_text(secs_per_step, self.unit_name), *self._texts()]))
