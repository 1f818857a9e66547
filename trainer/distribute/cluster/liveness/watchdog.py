"""Detection of an ended or stuck process of the job; names it, and ends this process.

Owns the reports of processes that have met, and decides when this process ends because of them. It must not know the
training loop, which only reports, nor use the devices: a collective would wait for the stuck process.

Detection of each fault:

- A process that ends or is killed: the other end of its connection detects it at once. This is process 0, or for
  process 0 all others. The launcher, if any, detects it too, and reports the first cause.
- A process that is suspended or cut off, or whose host is gone: process 0 detects the missing reports, or for process 0
  all others do.
- A process that lives but stalls, or whose script ends while others still wait for it: process 0 detects it, which
  alone has the reports of all. All adopt its diagnosis, the stuck process included: its own stack is the most useful.
  JAX blocks a process whose script has ended until all scripts have ended; if the others leave because of it, it ends
  as a process with its own error.
- Process 0 runs JAX's coordinator. After its end, JAX aborts the others in C++ (SIGABRT) within about 0.1 s. This is
  delayed (`join_cluster`) until this watchdog has printed the cause.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from trainer.core.arguments import require
from trainer.core.timing import set_progress
from trainer.distribute.cluster.description.process_names import process_name
from trainer.distribute.cluster.liveness.diagnosis import (
    START,
    Observer,
    Report,
    diagnose,
    heartbeat_secs,
    is_repeated,
    late_start,
    lost,
)
from trainer.distribute.cluster.liveness.process_end import FAILED, PEER_LOST, REFUSED, end_process
from trainer.distribute.cluster.rendezvous.connection import shortened
from trainer.distribute.cluster.rendezvous.star import Star

DEFAULT_TIMEOUT_SECS = 300.0
_MARGIN = 0.25  # of the limit: for the diagnosis to be made, and to get around
_MISSED_HEARTBEATS = 4  # are enough where something is known to be wrong
_GRACE_SECS = 0.2  # Ctrl-C ends all processes, but not at the same moment
_LAST_WORD_SECS = 1.0
_LINGER_SECS = 0.5
_PATIENCE = 12  # times the limit: processes that compile or save have ten
# Gloo's errors are ValueError if the CPU ran the collective in the call, and JaxRuntimeError otherwise.
_PEER_ERRORS = re.compile(r"\b(Gloo|NCCL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED)\b|Connection (closed|reset)")


class Watchdog:
    """Ends this process with exit code 75 when another process of the job is gone, or when the job stalls.

    Before that it prints to stderr the worker that is the cause, its step, its activity and the duration, and the
    Python stack of this process's main thread. The end of a process is detected at once. All other faults (see
    `diagnose`) take between three quarters of `timeout_secs` and all of it, unless the machine is overloaded.

    The watchdog is a daemon thread and needs Python's lock: a process whose code holds the lock for `timeout_secs`
    counts as gone. The watchdog begins at once, and ends with `stop`, or with the process.

    Args:
      timeout_secs: limit for the detection of a silent process or a stalled job, in seconds. Three quarters of it must
        exceed the longest execution and the longest wait for data. Must be the same in all processes. Compiling and
        saving may take ten times as long.
      star: connections to the other processes, which the watchdog owns from now on.

    Raises:
      ValueError: if `timeout_secs` is not greater than 0.

    Attributes:
      timeout_secs: limit in seconds.
    """

    def __init__(self, timeout_secs: float, star: Star):
        require({"timeout_secs": timeout_secs}, "a number above 0", lambda secs: secs > 0)
        self.timeout_secs = timeout_secs
        self._own_steps = 0  # of custom training loops
        self._now = (0, 0, START)  # moves, step and phase, in one attribute: the thread reads them
        self._star, self._process, self._name = star, star.process, process_name(star.process)
        self._heartbeats = 0
        self._observer = Observer(self._heartbeat_secs)
        self._ended: dict[int, float] = {}  # when the connections of processes did
        self._error = ""  # of this process, of which the others get to know
        self._has_failed = False  # the main thread, whose traceback says more than its stack
        self._is_hurried = False  # something is known to be wrong
        self._is_over = self._has_stopped = False  # the script; the watch
        self._last_word, self._leaving = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainer_watchdog", daemon=True)
        for worker, connection in star.connections.items():
            connection.set_patience(timeout_secs)
            self._observer.hear(time.monotonic(), worker, Report(0, 0, 0, START))
        if star.connections:
            self._thread.start()

    @property
    def _heartbeat_secs(self) -> float:
        return heartbeat_secs(self.timeout_secs)

    def started(self) -> None:
        """Reports that JAX has started in this process."""
        self._now = (0, 0, "idle")
        atexit.register(self._finish)  # before JAX's own exit, which waits for the others

    def progress(self, step: int, phase: str) -> None:
        """Reports progress of the main thread. Costs less than a microsecond.

        Args:
          step: number of begun steps; the same in all processes at the same position, and never decreasing.
          phase: activity of the thread from now on: "device" while it waits for a result, "host" while it starts
            executions, "agreement" while it waits for the others after its last steps, "compile", "checkpoint",
            "idle" between two runs, or any other word for its own work, such as "data" or "callbacks".
        """
        self._now = (self._now[0] + 1, step, phase)

    @contextlib.contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Reports that a custom training loop waits during the block, at its next step if it waits for "data"."""
        self._own_steps += phase == "data"
        self.progress(self._own_steps, phase)
        try:
            yield
        finally:
            self.progress(self._own_steps, "idle")

    def stop(self) -> None:
        """Ends the watch, and tells the others that this process sends no more reports. Can be called again."""
        atexit.unregister(self._finish)
        self._has_stopped = True
        self._finish()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD_SECS)
        elif not self._star.connections:
            self._star.close()

    def _finish(self) -> None:
        """Tells the others that the script has ended. They may still wait for this process, as JAX does for them.

        The watch continues until JAX lets the process end, because nothing else would end it if the others leave.
        """
        self._is_over = True
        if self._thread.is_alive():
            self._star.wake()
            self._last_word.wait(_LAST_WORD_SECS)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process is about to end because of its own error.

        If it does not end, the watch ends it with exit code 1 after the others have ended, before JAX would abort it.
        """
        said = ": ".join(filter(None, (type(error).__name__, str(error)))).partition("\n")[0].removesuffix(".")
        at = "while JAX started" if self._now[2] == START else f"at step {self._now[1]}"
        self._error = f"{self._name} has failed {at}: {shortened(said)}."
        self._finish()

    def await_diagnosis(self, secs: float | None = None) -> None:
        """Waits until the loss of a process is detected, so that this process ends with the exit code of a lost peer.

        Called by a main thread that failed with a collective and has printed its error. As a fault is certain then,
        four missing heartbeats are enough, 20 s at most. Returns if no process is lost.

        Args:
          secs: seconds to wait instead for a diagnosis that needs no missing heartbeats and no printed error.
        """
        if not self._thread.is_alive() or self._is_over:
            return
        if secs is None:
            self._has_failed = self._is_hurried = True
            self._star.wake()
            secs = (_MISSED_HEARTBEATS + 3) * self._heartbeat_secs
        self._thread.join(secs)
        if self._leaving.is_set():
            self._thread.join()

    def _watch(self) -> None:
        next_beat = 0.0
        while True:
            messages = self._star.receive(next_beat - time.monotonic())
            now = time.monotonic()
            urgent = [worker for worker, message in messages if self._take(now, worker, message)]
            if messages and not urgent and now < next_beat:
                continue
            if self._now[2] != START and not jax.distributed.is_initialized():
                self._has_stopped = self._is_over = True  # the script has shut down JAX's runtime
            has_stopped, is_over = self._has_stopped, self._is_over
            self._report()
            next_beat = now + self._heartbeat_secs
            if is_over:
                self._last_word.set()
            if has_stopped:
                self._star.close()
                return
            next_beat = min([next_beat, *(at + _GRACE_SECS for at in self._ended.values() if at + _GRACE_SECS > now)])
            text = self._diagnosis(now)
            if text is not None:
                self._leave(text)
                return

    def _take(self, now: float, worker: int, message: dict[str, Any] | None) -> bool:
        """Records the message of another process; returns whether a diagnosis may follow from it at once."""
        if message is None:
            self._ended[worker] = now
            return True
        report = Report.from_message(message.get("report"))
        if report is not None:
            self._observer.hear(now, worker, report)
        if message.get("is_hurried") is True:
            self._is_hurried = True
        return worker == self._process or (report is not None and report.diagnosis != "")

    def _report(self, diagnosis: str = "") -> None:
        """Sends the state of this process to all others."""
        self._heartbeats += 1
        moves, step, phase = self._now
        said = diagnosis or self._error
        report = Report(self._heartbeats, moves, step, "stopped" if self._is_over and not said else phase, said)
        if self._process == 0:
            self._observer.hear(time.monotonic(), 0, report)
        self._star.tell({"report": report, "is_hurried": self._is_hurried}, is_last=self._is_over or said != "")

    def _diagnosis(self, now: float) -> str | None:
        """Returns the reason why this process has to end, or None."""
        seen = self._observer.seen(now)
        if self._error:
            ended = all(connection.ended for connection in self._star.connections.values())
            return f"{self._error.removesuffix('.')}, and the others have ended." if ended else None
        gone = [worker for worker, at in self._ended.items()
                if now >= at + _GRACE_SECS and seen[worker].report.phase != "stopped"
                and not self._star.connections[worker].is_cut]
        if gone and not any(process.report.diagnosis for process in seen.values()):
            return lost(min(gone), seen, "its process has ended")
        text = diagnose(seen, self._star.cluster.num_processes, (1 - _MARGIN) * self.timeout_secs, self._silence_secs)
        return text or (late_start(seen, self.timeout_secs) if self._process == 0 else None)

    @property
    def _silence_secs(self) -> float:
        if self._is_hurried:
            return _MISSED_HEARTBEATS * self._heartbeat_secs
        # A process that has come to its end needs no other one any more, but process 0 watches on for the others.
        return math.inf if self._is_over and self._process else (1 - _MARGIN) * self.timeout_secs

    def _leave(self, text: str) -> None:
        """Prints the reason, and ends the process."""
        self._leaving.set()
        is_own = self._is_over and text.startswith(f"{self._name} ")
        step = "" if self._is_over or self._now[2] == START else f" at step {self._now[1]}"
        place = ("after the error above.\n" if self._has_failed else
                 "its script had ended.\n" if self._is_over and not self._error else None)
        linger_secs = 0.0
        if self._process == 0 and not self._error:  # the others end first: JAX aborts them without process 0
            self._report(text)
            linger_secs = 2.5 * self._heartbeat_secs + _LINGER_SECS
        quiet = {worker for worker, process in self._observer.seen(time.monotonic()).items()
                 if process.silent_secs > _MISSED_HEARTBEATS * self._heartbeat_secs}
        end_process(text, f"{self._name} ends{step}", lambda: self._star.drain(linger_secs, quiet), linger_secs,
                    REFUSED if is_repeated(text) else FAILED if is_own else PEER_LOST, place)


_current: Watchdog | None = None  # a process joins one cluster, once


def set_watchdog(watchdog: Watchdog) -> None:
    """Sets the watchdog of this process, which runs report their progress to."""
    global _current
    _current = watchdog
    set_progress(watchdog.progress)


def watchdog() -> Watchdog | None:
    """Returns the watchdog of this process; None outside of a cluster."""
    return _current


@contextlib.contextmanager
def waiting(phase: str) -> Iterator[None]:
    """Tells the watchdog that a custom training loop waits during the block.

    Args:
      phase: "data" if it waits for the data of the next step; "device" if it waits for all other processes.
    """
    with contextlib.nullcontext() if _current is None else _current.waiting(phase):
        yield


def patience_secs() -> float:
    """Returns the seconds to wait for other processes, longer than the watchdog, which names late processes."""
    return _PATIENCE * (DEFAULT_TIMEOUT_SECS if _current is None else _current.timeout_secs)


def is_peer_error(error: BaseException) -> bool:
    """Returns whether an error can come from the loss of another process, as raised by failed collectives.

    >>> is_peer_error(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    True
    """
    kinds = jax.errors.JaxRuntimeError, ValueError, TimeoutError
    return isinstance(error, kinds) and bool(_PEER_ERRORS.search(str(error)))
