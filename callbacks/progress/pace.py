"""How long a phase has taken, and how long a step of it takes."""

from __future__ import annotations

import time


class Pace:
    """Counts the steps of an epoch, of an evaluation or of a prediction, against the clock.

    The first execution, which may have to compile, is left out of a step's duration once as many steps have followed.

    Attributes:
      step: how many steps have been taken.

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
        """Notes that an execution has taken the count of steps to `step`."""
        if self.step == 0:
            self._first_step, self._first_end = step, time.perf_counter()
        self.step = step

    def elapsed_secs(self) -> float:
        """Returns the seconds since the beginning."""
        return time.perf_counter() - self._begin

    def secs_per_step(self) -> float:
        """Returns the mean duration of a step so far. At least one step must have been taken."""
        if self.step >= 2 * self._first_step:
            return (time.perf_counter() - self._first_end) / (self.step - self._first_step)
        return self.elapsed_secs() / self.step
