"""Noticing that another process of the job is gone or stuck, naming it, and ending this one.

Owns what processes tell each other about their progress, and what they conclude. It must not know the training loop,
which only reports, nor use the devices: a collective in here would wait for the very process that is stuck.

Who notices what:

- A process that ends: the launcher, where there is one, within 0.1 s. It ends the others and reports the first cause.
- A worker other than process 0 that is killed, suspended or cut off, or whose host is gone: this watchdog, in all
  others.
- A worker that lives but does not go on: this watchdog, in all processes, the stuck one included. Its own stack is
  the one that tells most.
- Process 0, which runs JAX's coordinator: if it is killed, JAX aborts the others in C++ (SIGABRT) within about 0.2 s,
  mostly before this watchdog can say a word. The launcher takes SIGABRT for exit code 75. If it is suspended or cut
  off, its connections stay open, and this watchdog notices.
- What no watchdog notices, such as a process that dies before its watchdog begins: JAX's own heartbeats.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping

import jax

from trainer.distribute.store import Store, jax_store

PEER_LOST = 75  # the exit code; schedulers take EX_TEMPFAIL for "start it again"

# What a process does by what it says. All else, such as "data", is work of its own.
WAITING = {"device"}  # for the result of an execution, so for all processes
DISPATCHING = {"host", "train", "validation", "test", "predict"}  # may wait too: CPUs run collectives in the call
OUTSIDE = {"idle", "stopped"}  # of any run: nobody can tell what comes, so that nobody has to hurry unless awaited
PATIENT = {"compile", "checkpoint", "idle"}  # may take `PATIENCE` times as long
PATIENCE = 10.0

_BEATS_PER_TIMEOUT = 16
_MAX_BEAT_SECS = 5.0
_MARGIN = 0.25  # of the limit: for reports to be sent, read and looked at, and for the verdict to get around
_MISSED_BEATS = 4  # are enough where something is known to be wrong
_LINK_JOIN_SECS = 1.0
_PRINT_SECS = 2.0  # stderr may be a pipe that nobody reads
_LINGER_SECS = 0.5
_KEYS = "trainer/watchdog/"
# Gloo's errors come as ValueError where the CPU ran the collective in the call, and as JaxRuntimeError otherwise.
_PEER_ERRORS = re.compile(r"\b(Gloo|NCCL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED)\b|Connection (closed|reset)")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process says of itself.

    Attributes:
      beat: changes with each report.
      moves: how often the process called `Watchdog.progress`.
      step: as it said then.
      phase: as it said then.
      verdict: what it has concluded, because of which it ends; empty if nothing.
    """

    beat: int
    moves: int
    step: int
    phase: str
    verdict: str = ""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one process knows of another, or of itself.

    Attributes:
      report: the last one.
      silent_secs: since the beat was last seen to change.
      still_secs: since the process was last seen to move.
    """

    report: Report
    silent_secs: float
    still_secs: float

    def __str__(self) -> str:
        return f'step {self.report.step}, "{self.report.phase}"'


class Observer:
    """Keeps how long ago each process was heard and moved, by this process's clock alone.

    Time in which this process did not look, as it was suspended itself, does not count for the others.

    Args:
      beat_secs: how often it is going to look.
    """

    def __init__(self, beat_secs: float):
        self._max_gap_secs = 2 * beat_secs
        self._looked_at: float | None = None
        self._clock = 0.0
        self._known: dict[int, tuple[Report, float, float]] = {}  # with the times of its last beat and move

    def observe(self, now: float, reports: Mapping[int, Report]) -> dict[int, Seen]:
        """Returns what is known of each process.

        Args:
          now: in seconds, of a clock that never goes back.
          reports: the last one of each process that has sent any.
        """
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._clock += min(gap, self._max_gap_secs)
        self._looked_at = now
        for worker, report in reports.items():
            old, heard, moved = self._known.get(worker, (None, self._clock, self._clock))
            if old is not None and old.beat != report.beat:
                heard = self._clock
            if old is not None and (old.moves, old.step, old.phase) != (report.moves, report.step, report.phase):
                moved = self._clock
            self._known[worker] = report, heard, moved
        return {worker: Seen(report, self._clock - heard, self._clock - moved)
                for worker, (report, heard, moved) in self._known.items()}


def verdict(
    seen: Mapping[int, Seen], num_processes: int, timeout_secs: float, silence_secs: float | None = None
) -> str | None:
    """Returns what is wrong with the job, or None if nothing is, or nothing yet.

    What a process has concluded, the others take over: it ends, and would seem to be to blame. Otherwise a process is
    lost that has not been heard for `silence_secs`, unless it has stopped its watchdog. Processes have stalled when all
    have begun, and none has moved for `timeout_secs`, or one waits for its device so long. To blame is then whoever
    does work of its own, such as "data", or else whoever compiles, saves or is between two runs, or else who may be
    waiting itself; among several the one of the lowest step. While a process compiles, saves or is between two runs,
    it has `PATIENCE` times as long before it is to blame, and so have those that wait for it.

    Args:
      seen: what is known of each process.
      num_processes: how many there are.
      timeout_secs: see above.
      silence_secs: see above; `timeout_secs` by default.

    >>> at_work, waits = Report(9, 80, 7, "data"), Report(9, 81, 7, "device")
    >>> verdict({0: Seen(waits, 0.5, 4.0), 1: Seen(at_work, 0.5, 4.5)}, 2, timeout_secs=4.0)
    'worker 1 has stalled at step 7, in "data" for 4.5 s, while worker 0 waits (step 7, "device").'
    """
    for one in seen.values():
        if one.report.verdict:
            return one.report.verdict
    heard = {worker: one for worker, one in seen.items() if one.report.phase != "stopped"}
    worker = max(heard, key=lambda worker: heard[worker].silent_secs, default=None)
    if worker is not None and heard[worker].silent_secs >= (silence_secs or timeout_secs):
        one = heard[worker]
        return (f'worker {worker} is lost: nothing was heard of it for {one.silent_secs:.1f} s. It was at step '
                f'{one.report.step}, in "{one.report.phase}".')
    if worker is None or len(seen) < num_processes or any(one.report.moves == 0 for one in heard.values()):
        return None
    if heard[worker].silent_secs > 2 * beat_secs(timeout_secs):
        return None  # it may turn out to be lost, and then has not stalled
    return _stall(seen, timeout_secs)


def _stall(seen: Mapping[int, Seen], timeout_secs: float) -> str | None:
    still = {worker: one for worker, one in seen.items() if one.still_secs >= timeout_secs}
    waiting = [worker for worker, one in still.items() if one.report.phase in WAITING]
    maybe_waiting = [worker for worker, one in still.items() if one.report.phase in WAITING | DISPATCHING]
    if len(still) == len(seen):
        suspects = set(still) - set(waiting)
        if not suspects or (len(maybe_waiting) == len(still) > 1
                            and len({(one.report.step, one.report.phase) for one in still.values()}) == 1):
            return (f"all workers wait for their devices, for {min(one.still_secs for one in still.values()):.1f} s: "
                    + ", ".join(f"worker {worker} at step {one.report.step}" for worker, one in sorted(still.items()))
                    + ". A device or a connection hangs, or an execution takes longer than the watchdog's limit.")
    elif waiting:
        last = max(seen[worker].report.step for worker in waiting)
        suspects = {worker for worker, one in still.items() if worker not in waiting and one.report.step <= last}
    else:
        return None
    culprit = min(suspects, key=lambda worker: _innocence(still[worker]), default=None)
    if culprit is None:
        return None
    one, others = still[culprit], [worker for worker in waiting or maybe_waiting if worker != culprit]
    is_due = one.still_secs >= timeout_secs * (PATIENCE if one.report.phase in PATIENT else 1.0)
    if not is_due or (one.report.phase in OUTSIDE and not others):
        return None
    text = f'worker {culprit} has stalled at step {one.report.step}, in "{one.report.phase}" for {one.still_secs:.1f} s'
    if others:
        text += f", while worker {others[0]} waits ({still[others[0]]})"
    return f"{text}."


def _innocence(one: Seen) -> tuple[int, int, float]:
    phase = one.report.phase
    return 1 if phase in PATIENT | OUTSIDE else 2 if phase in DISPATCHING else 0, one.report.step, -one.still_secs


def beat_secs(timeout_secs: float) -> float:
    """Returns how often processes report, in seconds.

    >>> beat_secs(4.0), beat_secs(300.0)
    (0.25, 5.0)
    """
    return min(timeout_secs / _BEATS_PER_TIMEOUT, _MAX_BEAT_SECS)


class Watchdog:
    """Ends this process with exit code 75 when another one of the job is gone, or when the job does not go on.

    Before that it says on stderr which worker is to blame, at which step, what it did and for how long, and prints the
    Python stack of this process's main thread. See `verdict` for what is noticed. It takes between three quarters of
    `timeout_secs` and all of it, if the machine is not overloaded. With one process it does nothing.

    Two daemon threads do it, one of which only talks with JAX's coordinator, so that the other one is not held up. They
    need Python's lock: code that holds it for `timeout_secs` is taken for a process that is gone. The watchdog begins
    at once, and ends with `stop`, or when the process does.

    Args:
      timeout_secs: within which to notice that a process is silent, or the job stands still. Three quarters of it must
        be more than the longest execution and the longest wait for data. Must be the same in all processes. Compiling
        and saving may take ten times as long.
      client: the key-value store that all processes share; JAX's by default.
      process: the index of this process and how many there are; JAX's by default.

    Raises:
      ValueError: if `timeout_secs` is not greater than 0.
      RuntimeError: if there are several processes, but JAX was not told so with `jax.distributed.initialize`.

    >>> watchdog = Watchdog(timeout_secs=60.0)
    >>> watchdog.progress(0, "data")
    >>> watchdog.stop()
    """

    def __init__(self, timeout_secs: float, client: Store | None = None, process: tuple[int, int] | None = None):
        if not timeout_secs > 0:
            raise ValueError(f"`timeout_secs` must be greater than 0. Received: {timeout_secs}.")
        self._timeout_secs = self._silence_secs = (1 - _MARGIN) * timeout_secs
        self._beat_secs = beat_secs(timeout_secs)
        place: tuple[int, int] = process or (jax.process_index(), jax.process_count())
        self._process, self._num_processes = place
        self._uses_jax = client is None
        self._now = (0, 0, "idle")  # moves, step and phase, in one attribute: they are read by other threads
        self._reports: dict[int, Report] = {}
        self._answers = 0  # of the store
        self._error = ""  # of the store
        self._verdict = ""
        self._lost: set[int] = set()
        self._stopping, self._leaving = threading.Event(), threading.Event()
        self._wake, self._look = threading.Event(), threading.Event()  # of the two threads, before the next beat
        self._threads: list[threading.Thread] = []
        if self._num_processes == 1:
            return
        self._client = client if client is not None else jax_store()
        if self._client is None:
            raise RuntimeError("A watchdog over several processes needs `jax.distributed.initialize` before it.")
        for name, target in (("trainer_watchdog", self._watch), ("trainer_watchdog_link", self._exchange_reports)):
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            self._threads[-1].start()
        atexit.register(self.stop)  # before JAX's own exit, which waits for the others

    def progress(self, step: int, phase: str) -> None:
        """Says that the main thread goes on. Costs less than a microsecond.

        Args:
          step: how many steps were begun; the same in all processes that are equally far, and never less than before.
          phase: what the thread does from now on: "device" if it waits for a result, "train", "validation", "test",
            "predict" or "host" if it starts executions, "compile", "checkpoint", "idle" between two runs, or any other
            word for work of its own, such as "data" or "callbacks".
        """
        self._now = (self._now[0] + 1, step, phase)

    def stop(self) -> None:
        """Ends the watch, and lets the others know that this process will say no more. May be called again."""
        atexit.unregister(self.stop)
        self._stopping.set()
        self._wake.set()
        self._look.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LINK_JOIN_SECS)

    def await_verdict(self) -> None:
        """Waits as long as it takes to notice that a process is lost, so that this one ends as one that lost a peer.

        For a main thread that failed because a collective did. As it is clear then that something is wrong, four
        missing beats are enough, 20 s at most. Returns if no process is lost.
        """
        if not self._threads or self._stopping.is_set():
            return
        self._silence_secs = _MISSED_BEATS * self._beat_secs
        self._threads[0].join(self._silence_secs + 3 * self._beat_secs)
        if self._leaving.is_set():
            self._threads[0].join()

    def _report(self, beat: int) -> Report:
        moves, step, phase = self._now
        return Report(beat, moves, step, "stopped" if self._stopping.is_set() else phase, self._verdict)

    def _exchange_reports(self) -> None:
        beat = 0
        while True:
            is_last = self._stopping.is_set()
            beat += 1
            try:
                own = json.dumps(dataclasses.astuple(self._report(beat)))
                self._client.key_value_set(f"{_KEYS}{self._process}", own, allow_overwrite=True)
                pairs = self._client.key_value_dir_get(_KEYS)
            except Exception as error:  # JAX raises what its C++ says, of several types
                if self._uses_jax and jax_store() is None:
                    self._stopping.set()  # somebody has shut down JAX's runtime: not the coordinator's fault
                self._error = str(error).partition("\n")[0]
            else:
                self._reports = {int(key.rpartition("/")[2]): Report(*json.loads(value)) for key, value in pairs}
                self._answers += 1
                self._error = ""
                if any(report.verdict for report in self._reports.values()):
                    self._look.set()
            if is_last:
                return
            self._wake.wait(0.1 if self._leaving.is_set() else self._beat_secs)
            self._wake.clear()

    def _watch(self) -> None:
        observer, store = Observer(self._beat_secs), Observer(self._beat_secs)
        beat = 0
        while True:
            self._look.wait(self._beat_secs)
            self._look.clear()
            if self._stopping.is_set():
                return
            beat += 1
            now = time.monotonic()
            answered = store.observe(now, {0: Report(self._answers, 0, 0, "")})[0].silent_secs
            seen = observer.observe(now, {**self._reports, self._process: self._report(beat)})
            self._lost = {worker for worker, one in seen.items() if one.silent_secs >= self._silence_secs}
            if answered >= self._silence_secs:
                said = f" ({self._error})" if self._error else ""
                at = f" It was at {seen[0]}." if 0 in seen else ""
                self._leave("worker 0, which coordinates the job, is lost: it has not answered for "
                            f"{answered:.1f} s{said}.{at}")
                return
            if answered > 2 * self._beat_secs:
                continue  # then nothing can be said of the others
            text = verdict(seen, self._num_processes, self._timeout_secs, self._silence_secs)
            if text is not None:
                self._leave(text)
                return

    def _leave(self, text: str) -> None:
        """Says why, and ends the process."""
        patience_secs = 2.5 * self._beat_secs
        self._verdict = text
        self._leaving.set()
        self._wake.set()
        guard = threading.Timer(_PRINT_SECS + patience_secs + _LINGER_SECS, os._exit, (PEER_LOST,))
        guard.daemon = True
        guard.start()
        print(f"Watchdog: {text} Worker {self._process} ends at step {self._now[1]} with exit code {PEER_LOST}; "
              f"its main thread is here:\n{_main_stack()}", end="", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # The end of process 0 aborts all others, whose stacks would be missing.
        deadline = time.monotonic() + patience_secs
        while self._process == 0 and time.monotonic() < deadline and not self._all_others_leave():
            time.sleep(0.02)
        time.sleep(_LINGER_SECS if self._process == 0 else _LINGER_SECS / 2)  # they say that they leave, then do
        os._exit(PEER_LOST)

    def _all_others_leave(self) -> bool:
        others = set(range(self._num_processes)) - {self._process} - self._lost
        return all(worker in self._reports and self._reports[worker].verdict for worker in others)


def is_peer_error(error: BaseException) -> bool:
    """Tells whether an error can come from the loss of another process, as failed collectives raise it.

    >>> is_peer_error(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    True
    """
    kinds = jax.errors.JaxRuntimeError, ValueError, TimeoutError
    return isinstance(error, kinds) and bool(_PEER_ERRORS.search(str(error)))


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has ended)\n"
