"""Ctrl-C, deferred during critical sections.

Owns the signal handler of a run. The loop decides which sections are critical. The handler that is deferred may be
that of `BackupAndRestore(save_on_error=True)`, which ends the run at its next save point.
"""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class Interrupts:
    """Defers Ctrl-C during certain blocks, as long as this context is open.

    The handler is set once and not for each block, because setting it takes longer than a small step.

    Example:
      >>> with Interrupts() as interrupts:
      ...     with interrupts.deferred:
      ...         pass
    """

    deferred: _Deferred

    def __enter__(self) -> Interrupts:
        # A new object each time: a callback may have kept the last handler, to call it from its own.
        self.deferred = _Deferred()
        handler = signal.getsignal(signal.SIGINT)
        # Python calls and sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self.deferred.handler = handler
            try:
                with self.deferred:
                    signal.signal(signal.SIGINT, self.deferred.handle)
            except BaseException:
                self._put_back()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self.deferred:
            self._put_back()

    def _put_back(self) -> None:
        # If other code has set a handler in the meantime, it stays.
        if self.deferred.handler is not None and signal.getsignal(signal.SIGINT) == self.deferred.handle:
            signal.signal(signal.SIGINT, self.deferred.handler)


class _Deferred:
    """A block that defers signals."""

    def __init__(self) -> None:
        self.handler: Any = None
        self._is_inside = False
        self._received: tuple[Any, ...] | None = None

    def handle(self, *signal_and_frame: Any) -> None:
        if self._is_inside:
            self._received = signal_and_frame
        else:
            self.handler(*signal_and_frame)

    def __enter__(self) -> None:
        self._is_inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_inside = False
        received, self._received = self._received, None
        if received is not None:
            self.handler(*received)
