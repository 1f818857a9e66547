"""Early ends of a `fit`: after a number of steps, or some time."""

from __future__ import annotations

import datetime
import time
from typing import Any

from trainer.core import arguments
from trainer.core.timing import Timing
from trainer.distribute import Strategy


class RunLimits:
    """The `max_steps` and `max_time` of a `fit`.

    Args:
      max_steps: maximum number of batches to train on, above 0, including batches before an interruption; None for no
        limit.
      max_time: seconds, or a `datetime.timedelta`, from now until the execution after which the run ends; None for no
        limit.

    Attributes:
      are_given: whether there is a limit, so that the data may be endless.

    Raises:
      TypeError: if `max_time` is of a wrong type.
      ValueError: if `max_time` is not above 0.

    Example:

    >>> limits = RunLimits(max_steps=10)
    >>> limits.last_batch(trained=8, batch=3)
    4
    """

    def __init__(self, max_steps: int | None = None, max_time: float | datetime.timedelta | None = None):
        if isinstance(max_time, datetime.timedelta):
            max_time = max_time.total_seconds()
        if max_time is not None:
            arguments.require_positive(max_time=max_time)
        self.are_given = (max_steps, max_time) != (None, None)
        self._max_steps = max_steps
        self._max_secs = max_time
        self._begin = time.monotonic()

    def last_batch(self, trained: int, batch: int) -> int | None:
        """Returns the index of the run's last batch in the epoch, after `trained` batches; None without `max_steps`."""
        return None if self._max_steps is None else batch + self._max_steps - trained - 1

    def are_reached(self, trained: int, strategy: Strategy, timing: Timing) -> bool:
        """Returns whether the run ends after `trained` batches; all processes must call it, and return the same."""
        if self._max_steps is not None and trained >= self._max_steps:
            return True
        if self._max_secs is None:
            return False
        is_over = time.monotonic() - self._begin >= self._max_secs
        if not strategy.spans_processes:
            return is_over
        with timing.agreement():
            return strategy.process_group.any(is_over)

    def describe(self) -> dict[str, Any]:
        """Returns the limits as plain data, which must be equal in all processes."""
        return {"max_steps": self._max_steps, "max_time": self._max_secs}
