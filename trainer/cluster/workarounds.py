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
from collections.abc import Callable, Iterator

from trainer.core.ambient.workarounds import are_on

_THREADS = "/proc/self/task"


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
def threads_that_wait_their_turn(use_gloo: Callable[[], bool]) -> Iterator[None]:
    """Lets threads that have started in the block run, once woken, only where no other thread of the core wants to.

    Gloo's thread polls its sockets without a pause while another thread has the lock of one of them. On Linux it takes
    the core from that very thread when data arrive, and keeps it for a slice of 3 ms: a sum over two processes on a
    core each took 3.9 ms instead of 0.15, and on shared cores up to twice as long. `SCHED_BATCH`, see sched(7), does
    not let it. Measured with jax 0.10.2 and 0.12.

    Args:
      use_gloo: returns, at the end of the block, whether Gloo connects the devices. Threads that launch work on GPUs
        stay as they are.
    """
    before = _threads()
    yield
    if are_on() and use_gloo():
        for thread in _threads() - before:
            with contextlib.suppress(OSError):  # of a sandbox, or it has ended: it is only about speed
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """Returns the kernel's numbers of this process's threads; none where they cannot be scheduled one by one."""
    return set(map(int, os.listdir(_THREADS))) if hasattr(os, "SCHED_BATCH") and os.path.isdir(_THREADS) else set()
