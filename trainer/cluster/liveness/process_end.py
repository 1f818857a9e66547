"""The end of a process that the job does not go on with: what it says then, and its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable

REFUSED = 2  # the exit code of what would happen again; `trainer.launch` does not start again after it
FAILED = 1  # the exit code of a process with an error of its own
PEER_LOST = 75  # the exit code; schedulers take EX_TEMPFAIL for "start it again"

_PRINT_SECS = 2.0  # stderr may be a pipe without a reader
_ending = threading.Lock()  # held by the thread that ends the process


def end_process(
    text: str, ends: str, linger: Callable[[], None], linger_secs: float, code: int = PEER_LOST,
    place: str | None = None,
) -> None:
    """Says why on stderr, with the Python stack of the main thread, and ends the process.

    It returns only if another thread does so already.

    Args:
      text: what has happened, as a sentence.
      ends: that this process ends, such as "worker 0 ends at step 3"; it begins a sentence.
      linger: what there is to wait for in between.
      linger_secs: how long it waits at most.
      code: the exit code.
      place: what to say of the main thread in the place of its stack.
    """
    if not _ending.acquire(blocking=False):
        return
    guard = threading.Timer(_PRINT_SECS + linger_secs, os._exit, (code,))
    guard.daemon = True
    with contextlib.suppress(RuntimeError):  # Python starts no thread any more once the script has ended
        guard.start()
    ends = ends[:1].upper() + ends[1:]
    place = place or f"its main thread is here:\n{_main_stack()}"
    # On a line of its own, as JAX may be printing too.
    print(f"\nWatchdog: {text} {ends} with exit code {code}; {place}", end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    linger()
    os._exit(code)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has ended)\n"
