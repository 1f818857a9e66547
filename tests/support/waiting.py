"""Waiting for other threads and processes.

No test asserts a time: each waits until the awaited has happened. Only a test that would fail waits for the guard.
"""

import time
from collections.abc import Callable

GUARD_SECS = 120.0  # after which a test that hangs fails, on a busy machine too
LONG_SECS = 600.0  # a timeout that no test reaches: whoever ends within the guard has not waited for it


def until(condition: Callable[[], object]) -> None:
    """Returns as soon as a condition holds."""
    deadline = time.monotonic() + GUARD_SECS
    while not condition():
        assert time.monotonic() < deadline, "The condition did not come true."
        time.sleep(0.005)
