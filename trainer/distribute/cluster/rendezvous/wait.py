"""Time that a process waits for the others, and its messages in the meantime."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECS = 0.1  # how late a deadline or a line may be


class Wait:
    """A deadline, with periodic messages until then.

    Args:
      timeout_secs: seconds from now to the deadline.
      say: function that is called with each line.
      say_every_secs: seconds between lines.
    """

    def __init__(self, timeout_secs: float, say: Callable[[str], None], say_every_secs: float):
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
        """Seconds to sleep before the next check of the deadline and of a due line."""
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
