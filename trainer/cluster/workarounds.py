"""Tricks with the process that JAX's runtime makes necessary over several processes, each with its reason.

`TRAINER_WORKAROUNDS=0` in the environment turns all of them off. `tests/cluster/test_workarounds.py` fails when JAX
does not need a workaround any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from collections.abc import Iterator

SWITCH = "TRAINER_WORKAROUNDS"


def are_on() -> bool:
    """Returns whether the environment leaves the workarounds on."""
    return os.environ.get(SWITCH, "1") != "0"


def put_off_aborts() -> None:
    """Lets what notices the end of process 0 end this process before JAX does, which aborts it then.

    JAX's client of the coordinator calls abort() in C++ as soon as the coordinator is gone, so that the process ends
    without a word about the cause. JAX has no option against it. Measured with jax 0.10.2 and 0.12.

    The thread of JAX that calls abort() sleeps first, for as many seconds as the signal has for a number: sleep() is a
    function that may handle a signal, and one of Python is not. If the process still runs then, abort() ends it.
    """
    if are_on() and not faulthandler.is_enabled():  # with it, the user wants to see aborts
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)


@contextlib.contextmanager
def threads_that_wait_their_turn() -> Iterator[None]:
    """Lets threads that start in the block run, once woken, only where no other thread of the core wants to.

    Gloo's thread polls its sockets without a pause while another thread has the lock of one of them. On Linux it takes
    the core from that very thread when data arrive, and keeps it for a slice of 3 ms: a sum over two processes on a
    core each took 3.9 ms instead of 0.15, and on shared cores up to twice as long. `SCHED_BATCH`, see sched(7), does
    not let it. Measured with jax 0.10.2 and 0.12.
    """
    if not are_on() or not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with contextlib.suppress(OSError):  # of a sandbox: it is only about speed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
