"""End of a process of a failed job: its message and its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable

REFUSED = 2  # the exit code of an error that would happen again; `trainer.launch` does not start again after it
FAILED = 1  # the exit code of a process with an error of its own
PEER_LOST = 75  # the exit code; schedulers take EX_TEMPFAIL for "start it again"

_PRINT_SECS = 2.0  # stderr may be a pipe without a reader
_ending = threading.Lock()  # held by the thread that ends the process


def end_process(
    text: str, ends: str, linger: Callable[[], None], linger_secs: float, code: int = PEER_LOST,
    place: str | None = None,
) -> None:
    """Prints the cause to stderr, with the Python stack of the main thread, and ends the process.

    Returns only if another thread is already ending the process.

    Args:
      text: sentence that describes the cause.
      ends: beginning of a sentence on the end of this process, such as "worker 0 ends at step 3".
      linger: function that waits before the end.
      linger_secs: maximum seconds of that wait.
      code: exit code.
      place: text that replaces the stack of the main thread.
    """
    if not _ending.acquire(blocking=False):
        return
    guard = threading.Timer(_PRINT_SECS + linger_secs, os._exit, (code,))
    guard.daemon = True
    with contextlib.suppress(RuntimeError):  # Python starts no thread any more once the script has ended
        guard.start()
    ends = ends[:1].upper() + ends[1:]
    place = place or f"its main thread is here:\n{_main_stack()}"
    # On its own line, because JAX may be printing too.
    print(f"\nWatchdog: {text} {ends} with exit code {code}; {place}", end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    linger()
    os._exit(code)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has ended)\n"
