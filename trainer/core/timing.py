"""Time measurements of a run.

Owns the clock of `fit`, `evaluate` and `predict`, by the activity or wait of the host. It must not know the code that
runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

CATEGORIES = ("data", "compile", "device", "callbacks", "checkpoint")


class Timing:
    """Measures the seconds of a run by category, from its creation on.

    Time inside of a nested measurement counts only for that measurement, so the categories add up to the total. The
    rest is "host", the loop itself.

    Attributes:
      rows: number of training rows of the run so far; counted by the loop.
      steps: number of all steps of the run so far; see `begin_steps`.
      on_phase: called with the category of the time from now on, or "host"; None for no call.
      inner_secs: seconds of other runs inside of this run, such as an `evaluate` in a callback; counted by the outer
        run, and in some category too.

    Example:
      >>> timing = Timing()
      >>> with timing.measure("callbacks"), timing.measure("device"):
      ...     time.sleep(0.01)
      >>> report = timing.report()
      >>> report["device"] >= 0.01 > report["callbacks"]
      True
    """

    def __init__(self) -> None:
        self._now = time.perf_counter  # an open iterator of predictions may end after this module
        self.rows = self.steps = 0
        self.on_phase: Callable[[str], None] | None = None
        self.inner_secs = 0.0
        self._secs = dict.fromkeys(CATEGORIES, 0.0)
        self._begin = self._now()
        self._measurements = {name: _Measurement(self, name) for name in CATEGORIES}
        self._open: list[str] = []
        self._since = self._begin
        self._end: float | None = None

    def begin_steps(self, count: int) -> None:
        """Counts steps that are about to begin, and reports them, because they may hang."""
        self.steps += count
        self.tell(self._open[-1] if self._open else "host")

    def tell(self, phase: str) -> None:
        """Reports the activity of the run until the next measurement begins or ends."""
        if self.on_phase is not None:
            self.on_phase(phase)

    def measure(self, category: str) -> _Measurement:
        """Returns a context manager whose block counts for `category`, a name in `CATEGORIES`."""
        return self._measurements[category]

    def seconds(self, category: str) -> float:
        """Returns the seconds of a category so far, without an open measurement."""
        return self._secs[category]

    @property
    def is_running(self) -> bool:
        """Whether the run has not ended."""
        return self._end is None

    def end(self) -> None:
        """Stops the clock. Later measurements, such as reading logs, are not reported."""
        self.on_phase = None
        self._end = self._now()

    def report(self) -> dict[str, float]:
        """Returns the seconds so far by category, with "host" and "total", and the rate "rows_per_sec".

        The rate is the number of training rows over the total time without compilation.
        """
        now = self._end or self._now()
        total = now - self._begin
        secs = dict(self._secs)
        if self._open:
            secs[self._open[-1]] += now - self._since
        running = total - secs["compile"]
        return {**secs, "host": max(total - sum(secs.values()), 0.0), "total": total,
                "rows_per_sec": self.rows / running if running > 0 else 0.0}


class _Measurement:
    # A class, because generators make context managers several times slower, and the loop enters a few per execution.
    def __init__(self, timing: Timing, category: str):
        self._timing = timing
        self._category = category

    def __enter__(self) -> None:
        timing = self._timing
        now = timing._now()
        if timing._open:
            timing._secs[timing._open[-1]] += now - timing._since
        timing._open.append(self._category)
        timing._since = now
        if timing.on_phase is not None:
            timing.on_phase(self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        timing = self._timing
        now = timing._now()
        timing._secs[timing._open.pop()] += now - timing._since
        timing._since = now
        if timing.on_phase is not None:
            timing.on_phase(timing._open[-1] if timing._open else "host")
