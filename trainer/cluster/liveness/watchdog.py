"""Noticing that another process of the job is gone or stuck, naming it, and ending this process.

Owns the reports of processes that have met, and decides when this process ends because of them. It must not know the
training loop, which only reports, nor use the devices: a collective would wait for the very process that is stuck.

Who notices which fault:

- A process that ends or is killed: the other end of its connection, at once; that is process 0, or for process 0
  all others. So does the launcher, if any, which reports the first cause.
- A process that is suspended or cut off, or whose host is gone: process 0 by the missing reports, or for process 0 all
  others.
- A process that lives but does not go on, or whose script ends while others still wait for it: process 0, which alone
  has the reports of all. All take over its diagnosis, the stuck process included: its own stack is the most useful.
  JAX holds up a process whose script has ended until all have come to their end; should the others leave because of it,
  it ends as a process with its own error.
- Process 0 runs JAX's coordinator. When it has ended, JAX aborts the others in C++ (SIGABRT) within about 0.1 s. That
  is put off (`join_cluster`) until this watchdog has said what there is to say.
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

from trainer.cluster.description.process_names import process_name
from trainer.cluster.liveness.diagnosis import (
    START,
    Observer,
    Report,
    diagnose,
    heartbeat_secs,
    is_repeated,
    late_start,
    lost,
)
from trainer.cluster.liveness.process_end import FAILED, PEER_LOST, REFUSED, end_process
from trainer.cluster.rendezvous.connection import shortened
from trainer.cluster.rendezvous.star import Star
from trainer.core.arguments import require

DEFAULT_TIMEOUT_SECS = 300.0
_MARGIN = 0.25  # of the limit: for the diagnosis to be made, and to get around
_MISSED_HEARTBEATS = 4  # are enough where something is known to be wrong
_GRACE_SECS = 0.2  # Ctrl-C ends all processes, but not at the same moment
_LAST_WORD_SECS = 1.0
_LINGER_SECS = 0.5
_PATIENCE = 12  # times the limit: those that compile or save have ten
# Gloo's errors come as ValueError where the CPU ran the collective in the call, and as JaxRuntimeError otherwise.
_PEER_ERRORS = re.compile(r"\b(Gloo|NCCL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED)\b|Connection (closed|reset)")


class Watchdog:
    """Ends this process with exit code 75 when another one of the job is gone, or when the job does not go on.

    Before that it says on stderr which worker is the cause, at which step, what it did and for how long, and prints the
    Python stack of this process's main thread. The end of a process is noticed at once. All other faults, which
    `diagnose` lists, take between three quarters of `timeout_secs` and all of it, if the machine is not overloaded.

    A daemon thread does it. It needs Python's lock: code that holds it for `timeout_secs` is taken for a process that
    is gone. The watchdog begins at once, and ends with `stop`, or when the process does.

    Args:
      timeout_secs: within which to notice that a process is silent, or the job stands still. Three quarters of it must
        be more than the longest execution and the longest wait for data. Must be the same in all processes. Compiling
        and saving may take ten times as long.
      star: the connections to the other processes, which are the watchdog's from now on.

    Raises:
      ValueError: if `timeout_secs` is not greater than 0.

    Attributes:
      timeout_secs: see above.
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
        """Says that JAX has started in this process."""
        self._now = (0, 0, "idle")
        atexit.register(self._finish)  # before JAX's own exit, which waits for the others

    def progress(self, step: int, phase: str) -> None:
        """Says that the main thread goes on. Costs less than a microsecond.

        Args:
          step: how many steps were begun; the same in all processes that are equally far, and never less than before.
          phase: what the thread does from now on: "device" if it waits for a result, "host" if it starts executions,
            "agreement" if it waits for the others at the end of an epoch, "compile", "checkpoint", "idle" between two
            runs, or any other word for work of its own, such as "data" or "callbacks".
        """
        self._now = (self._now[0] + 1, step, phase)

    @contextlib.contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Says that a custom training loop waits while the block runs, at its next step if it waits for "data"."""
        self._own_steps += phase == "data"
        self.progress(self._own_steps, phase)
        try:
            yield
        finally:
            self.progress(self._own_steps, "idle")

    def stop(self) -> None:
        """Ends the watch, and lets the others know that this process will say no more. May be called again."""
        atexit.unregister(self._finish)
        self._has_stopped = True
        self._finish()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD_SECS)
        elif not self._star.connections:
            self._star.close()

    def _finish(self) -> None:
        """Lets the others know that the script has ended. They may still wait for this process, as JAX does for them.

        The watch goes on until JAX lets the process end: should the others leave because of it, nothing else would.
        """
        self._is_over = True
        if self._thread.is_alive():
            self._star.wake()
            self._last_word.wait(_LAST_WORD_SECS)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process is about to end because of an error of its own.

        If it does not end, the watch ends it with exit code 1 when the others have ended: JAX would abort it.
        """
        said = ": ".join(filter(None, (type(error).__name__, str(error)))).partition("\n")[0].removesuffix(".")
        at = "while JAX started" if self._now[2] == START else f"at step {self._now[1]}"
        self._error = f"{self._name} has failed {at}: {shortened(said)}."
        self._finish()

    def await_diagnosis(self, secs: float | None = None) -> None:
        """Waits as long as it takes to notice that a process is lost, so that this process ends with the exit code of a
        lost peer.

        For a main thread that failed because a collective did, and has printed its error. As it is clear then that
        something is wrong, four missing heartbeats are enough, 20 s at most. Returns if no process is lost.

        Args:
          secs: how long to wait instead for a diagnosis that needs no missing heartbeats, and no printed error.
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
        """Takes what another process says; returns whether something may follow from it at once."""
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
        """Says to all others what this process does."""
        self._heartbeats += 1
        moves, step, phase = self._now
        said = diagnosis or self._error
        report = Report(self._heartbeats, moves, step, "stopped" if self._is_over and not said else phase, said)
        if self._process == 0:
            self._observer.hear(time.monotonic(), 0, report)
        self._star.tell({"report": report, "is_hurried": self._is_hurried}, is_last=self._is_over or said != "")

    def _diagnosis(self, now: float) -> str | None:
        """Returns why this process has to end, if it has to."""
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
        """Says why, and ends the process."""
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
    """Makes a watchdog the one of this process."""
    global _current
    _current = watchdog


def watchdog() -> Watchdog | None:
    """Returns what watches over the processes of the cluster; None outside of a cluster."""
    return _current


@contextlib.contextmanager
def waiting(phase: str) -> Iterator[None]:
    """Lets the watchdog know what a custom training loop waits for while the block runs.

    Args:
      phase: "data", for those of the next step; or "device", for all other processes.
    """
    with contextlib.nullcontext() if _current is None else _current.waiting(phase):
        yield


def patience_secs() -> float:
    """Returns how long to wait for other processes, longer than the watchdog, which names who is late."""
    return _PATIENCE * (DEFAULT_TIMEOUT_SECS if _current is None else _current.timeout_secs)


def is_peer_error(error: BaseException) -> bool:
    """Tells whether an error can come from the loss of another process, as failed collectives raise it.

    >>> is_peer_error(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    True
    """
    kinds = jax.errors.JaxRuntimeError, ValueError, TimeoutError
    return isinstance(error, kinds) and bool(_PEER_ERRORS.search(str(error)))
