"""How the operating system shares a core among the threads of a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def threads_that_wait_their_turn() -> Iterator[None]:
    """Lets threads that start in the block run, once woken, only where no other thread of the core wants to.

    Gloo's thread polls its sockets without a pause while another thread has the lock of one of them. On Linux it takes
    the core from that very thread when data arrive, and keeps it for a slice of 3 ms: a sum over two processes on a
    core each took 3.9 ms in the place of 0.15, and on shared cores up to twice as long. `SCHED_BATCH`, see sched(7),
    does not let it.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with contextlib.suppress(OSError):  # of a sandbox: it is only about speed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
