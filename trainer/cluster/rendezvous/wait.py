"""How long a process has waited for the others, and what it says meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.cluster.description.cluster_description import ClusterDescription

POLL_SECS = 0.1  # how late a deadline or a line may be


class Wait:
    """A deadline, and lines said at intervals until then.

    Args:
      cluster: whose processes are awaited.
      timeout_secs: from now to the deadline.
      say: is called with each line.
      say_every_secs: from one line to the next.
    """

    def __init__(
        self, cluster: ClusterDescription, timeout_secs: float, say: Callable[[str], None], say_every_secs: float
    ):
        self.cluster = cluster
        self.timeout_secs = timeout_secs
        self._say = say
        self._say_every_secs = say_every_secs
        self._start = time.monotonic()
        self._next_line = self._start + say_every_secs

    @property
    def remaining_secs(self) -> float:
        """Seconds to the deadline; negative after it."""
        return self._start + self.timeout_secs - time.monotonic()

    @property
    def poll_secs(self) -> float:
        """How long to sleep before looking again at the deadline and at whether a line is due."""
        return max(0.0, min(POLL_SECS, self.remaining_secs, self._next_line - time.monotonic()))

    def say(self, line: str) -> None:
        """Says a line now."""
        self._say(line)

    def say_if_due(self, line: Callable[[], str]) -> None:
        """Says a line, if the last line was long enough ago."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + self._say_every_secs
            self._say(f"{line()} ({now - self._start:.0f} s of {self.timeout_secs:g} s)")
