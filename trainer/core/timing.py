"""Where the time of a run goes.

Owns the clock of `fit`, `evaluate` and `predict`, by what the host does or waits for. It must not know what runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

CATEGORIES = ("data", "compile", "device", "callbacks", "checkpoint")


class Timing:
    """Measures, from its creation on, how many seconds of a run go to what.

    The time inside of a nested measurement counts for that measurement alone, so the categories add up to the whole:
    what is left of it is "host", the loop itself.

    Attributes:
      rows: training rows of the run so far; counted by the loop.
      steps: likewise all steps; see `begin_steps`.
      on_phase: called with the category that time goes to from now on, or "host"; None for no call.
      inner_secs: the seconds of other runs inside of this run, such as an `evaluate` that a callback calls; counted by
        the outer run, and in some category too.

    Example:
      >>> timing = Timing()
      >>> with timing.measure("callbacks"), timing.measure("device"):
      ...     time.sleep(0.01)
      >>> report = timing.report()
      >>> report["device"] >= 0.01 > report["callbacks"]
      True
    """

    def __init__(self) -> None:
        self._now = time.perf_counter  # an iterator of predictions that is left open ends after this module
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
        """Counts steps that are about to begin, and tells so who watches the run, as they may hang."""
        self.steps += count
        self.tell(self._open[-1] if self._open else "host")

    def tell(self, phase: str) -> None:
        """Tells who watches the run what it does until the next measurement begins or ends."""
        if self.on_phase is not None:
            self.on_phase(phase)

    def measure(self, category: str) -> _Measurement:
        """Returns a context manager whose block counts for `category`, one of `CATEGORIES`."""
        return self._measurements[category]

    def seconds(self, category: str) -> float:
        """Returns the seconds of a category so far, without a measurement that is still open."""
        return self._secs[category]

    @property
    def is_running(self) -> bool:
        """Whether the run goes on."""
        return self._end is None

    def end(self) -> None:
        """Stops the clock: the run is over, and what is measured later, such as reading logs, is not reported."""
        self.on_phase = None
        self._end = self._now()

    def report(self) -> dict[str, float]:
        """Returns the seconds so far by category, with "host" and "total", and the rate "rows_per_sec".

        The rate is of training rows, over the total without what compiling took.
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
    # A class, as generators make context managers several times slower, and the loop enters a few in each execution.
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
