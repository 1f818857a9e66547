"""Time measurements of a run.

Owns the clock of `fit`, `evaluate` and `predict`, by the activity or wait of the host, and the reports of this activity
to a watchdog. It must not know the code that runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType

Progress = Callable[[int, str], None]  # given the number of begun steps, and the activity from now on

_progress: Progress | None = None


def set_progress(progress: Progress) -> None:
    """Sets the function that the runs of this process report their progress to."""
    global _progress
    _progress = progress


class Timing:
    """Measures the seconds of a run by category, from its creation on.

    Time inside of a nested measurement counts only for that measurement, so the categories add up to the total. The
    rest is "host", the loop itself.

    Attributes:
      data, compile, device, callbacks, checkpoint: the categories, as context managers that measure their block.
      rows: number of training rows of the run so far; counted by the loop.
      steps: number of all steps of the run so far; see `begin_steps`.
      inner_secs: seconds of other runs inside of this run, such as an `evaluate` in a callback; counted by the outer
        run, and in some category too.

    Example:
      >>> timing = Timing()
      >>> with timing.callbacks, timing.device:
      ...     time.sleep(0.01)
      >>> report = timing.report()
      >>> report["device"] >= 0.01 > report["callbacks"]
      True
    """

    def __init__(self) -> None:
        self._now = time.perf_counter  # an open iterator of predictions may end after this module
        self.rows = self.steps = 0
        self._progress: Progress | None = None
        self.inner_secs = 0.0
        self.data = Measurement(self, "data")
        self.compile = Measurement(self, "compile")
        self.device = Measurement(self, "device")
        self.callbacks = Measurement(self, "callbacks")
        self.checkpoint = Measurement(self, "checkpoint")
        self._open: list[Measurement] = []
        self._begin = self._since = self._now()
        self._end: float | None = None

    def begin_steps(self, count: int) -> None:
        """Counts steps that are about to begin, and reports them, because they may hang."""
        self.steps += count
        if self._progress is not None:
            self._progress(self.steps, self._open[-1].category if self._open else "host")

    def begin_progress(self) -> None:
        """Reports the steps and the activity of the run from now on, to the function of `set_progress`."""
        self._progress = _progress
        self.tell("host")

    def tell(self, activity: str) -> None:
        """Reports the activity of the run until the next measurement begins or ends."""
        if self._progress is not None:
            self._progress(self.steps, activity)

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        """Measures and reports the wait of the block for the agreement of all processes after their last steps."""
        with self.device:
            self.tell("agreement")
            yield

    @property
    def is_running(self) -> bool:
        """Whether the run has not ended."""
        return self._end is None

    def end(self, activity: str = "idle") -> None:
        """Stops the clock, and reports the activity that follows: "host" if an outer run goes on.

        Later measurements are not reported.
        """
        self._end = self._now()
        self.tell(activity)
        self._progress = None

    def report(self) -> dict[str, float]:
        """Returns the seconds so far by category, with "host" and "total", and the rate "rows_per_sec".

        The rate is the number of training rows over the total time without compilation.
        """
        now = self._end or self._now()
        total = now - self._begin
        secs = {each.category: each.secs for each in (
            self.data, self.compile, self.device, self.callbacks, self.checkpoint)}
        if self._open:
            secs[self._open[-1].category] += now - self._since
        running = total - secs["compile"]
        return {**secs, "host": max(total - sum(secs.values()), 0.0), "total": total,
                "rows_per_sec": self.rows / running if running > 0 else 0.0}


class Measurement:
    """A category of time; as a context manager, it measures the seconds of a block.

    Attributes:
      category: its name.
      secs: the seconds so far, without an open block.
    """

    # A class, because generators make context managers several times slower, and the loop enters a few per execution.
    def __init__(self, timing: Timing, category: str):
        self.category = category
        self.secs = 0.0
        self._timing = timing

    def __enter__(self) -> None:
        timing = self._timing
        now = timing._now()
        if timing._open:
            timing._open[-1].secs += now - timing._since
        timing._open.append(self)
        timing._since = now
        if timing._progress is not None:
            timing._progress(timing.steps, self.category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        timing = self._timing
        now = timing._now()
        timing._open.pop().secs += now - timing._since
        timing._since = now
        if timing._progress is not None:
            timing._progress(timing.steps, timing._open[-1].category if timing._open else "host")
