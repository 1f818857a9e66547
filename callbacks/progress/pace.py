"""Elapsed time of a phase, and time per step."""

from __future__ import annotations

import time


class Pace:
    """Measures the steps of an epoch, an evaluation or a prediction.

    Once as many steps have followed, the time per step excludes the first execution, which may compile.

    Attributes:
      step: number of steps so far.

    Example:

    >>> pace = Pace()
    >>> pace.reach(10)
    >>> pace.step, pace.secs_per_step() <= pace.elapsed_secs()
    (10, True)
    """

    def __init__(self):
        self.step = 0
        self._begin = time.perf_counter()
        self._first_step, self._first_end = 0, self._begin

    def reach(self, step: int) -> None:
        """Records that an execution has reached the step count `step`."""
        if self.step == 0:
            self._first_step, self._first_end = step, time.perf_counter()
        self.step = step

    def elapsed_secs(self) -> float:
        """Returns the seconds since the start."""
        return time.perf_counter() - self._begin

    def secs_per_step(self) -> float:
        """Returns the mean seconds per step so far. Needs at least one step."""
        if self.step >= 2 * self._first_step:
            return (time.perf_counter() - self._first_end) / (self.step - self._first_step)
        return self.elapsed_secs() / self.step
