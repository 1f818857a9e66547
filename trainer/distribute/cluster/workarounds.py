"""Workarounds for JAX's runtime over several processes, each with its reason.

`TRAINER_WORKAROUNDS=0` in the environment disables them. `tests/cluster/test_workarounds.py` fails when JAX no longer
needs a workaround; for a workaround that saves time, `benchmarks/sums_over_processes.py` tells.
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
    """Delays JAX's abort after the end of process 0, so that the watchdog can end this process first.

    JAX's client of the coordinator calls abort() in C++ as soon as the coordinator is gone, so that the process ends
    without a message about the cause. JAX has no option against it. Measured with jax 0.10.2 and 0.12.

    The JAX thread that calls abort() first sleeps, for as many seconds as the number of the signal: sleep() can be a
    signal handler, and a Python function cannot. If the process still runs then, abort() ends it.
    """
    if are_on() and not faulthandler.is_enabled():  # with it, the user wants to see aborts
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)


@contextlib.contextmanager
def threads_that_wait_their_turn(use_gloo: Callable[[], bool]) -> Iterator[None]:
    """Makes threads started in the block run, once woken, only if no other thread of the core is ready.

    Gloo's thread polls its sockets without a pause while another thread holds the lock of a socket. On Linux it
    preempts that thread when data arrive, and keeps the core for a slice of 3 ms: a sum over two processes on a core
    each took 3.9 ms instead of 0.15, and on shared cores up to twice as long. `SCHED_BATCH`, see sched(7), prevents
    this. Measured with jax 0.10.2 and 0.12.

    Args:
      use_gloo: returns, at the end of the block, whether Gloo connects the devices. Threads that launch work on GPUs
        are unchanged.
    """
    before = _threads()
    yield
    if are_on() and use_gloo():
        for thread in _threads() - before:
            with contextlib.suppress(OSError):  # of a sandbox, or it has ended: it is only about speed
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """Returns the kernel's numbers of this process's threads; none if they cannot be scheduled individually."""
    return set(map(int, os.listdir(_THREADS))) if hasattr(os, "SCHED_BATCH") and os.path.isdir(_THREADS) else set()
