"""The end of a process because of another one: what it says then, and its exit code."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

PEER_LOST = 75  # the exit code; schedulers take EX_TEMPFAIL for "start it again"

_PRINT_SECS = 2.0  # stderr may be a pipe that nobody reads
_ending = threading.Lock()  # held by the thread that ends the process


def end_process(text: str, ends: str, linger: Callable[[], None], linger_secs: float, shows_stack: bool = True) -> None:
    """Says why on stderr, with the Python stack of the main thread, and ends the process with `PEER_LOST`.

    It returns only if another thread does so already.

    Args:
      text: what has happened, as a sentence.
      ends: that this process ends, such as "Worker 0 ends at step 3".
      linger: what there is to wait for in between.
      linger_secs: how long it waits at most.
      shows_stack: False if the main thread has failed, whose traceback tells more.
    """
    if not _ending.acquire(blocking=False):
        return
    guard = threading.Timer(_PRINT_SECS + linger_secs, os._exit, (PEER_LOST,))
    guard.daemon = True
    guard.start()
    place = f"its main thread is here:\n{_main_stack()}" if shows_stack else "after the error above.\n"
    # On a line of its own, as JAX may be printing too.
    print(f"\nWatchdog: {text} {ends} with exit code {PEER_LOST}; {place}", end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    linger()
    os._exit(PEER_LOST)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has ended)\n"
