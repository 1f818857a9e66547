"""Noticing that another process of the job is gone or stuck, naming it, and ending this process.

Owns what processes report of their progress, and what follows for this process. It must not know the training loop,
which only reports, nor use the devices: a collective in here would wait for the very process that is stuck.

What notices what:

- A process that ends or is killed: the other end of its connection, at once; that is process 0, or for process 0
  all others. So does the launcher, if any, which reports the first cause.
- A process that is suspended or cut off, or whose host is gone: this watchdog, in all others.
- A process that lives but does not go on: this watchdog, in all processes, the stuck process included. Its own stack is
  the most useful.
- A process whose script ends while others still wait for it: this watchdog, in these. JAX holds the process up until
  all have come to their end; it ends as a process with its own error when the others leave because of it.
- Process 0 runs JAX's coordinator. When it has ended, JAX aborts the others in C++ (SIGABRT) within about 0.1 s. That
  is put off (`join_cluster`) until this watchdog has said what there is to say.
- What no watchdog notices, such as a process that dies before its watchdog begins: JAX's own heartbeats.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator

import jax

from trainer.cluster.description.cluster_description import split_address
from trainer.cluster.description.process_names import process_name
from trainer.cluster.liveness.diagnosis import Observer, Report, diagnose, heartbeat_secs, is_repeated, lost
from trainer.cluster.liveness.key_value_store import Store, coordinator_address, jax_store
from trainer.cluster.liveness.peer_connections import PeerConnections
from trainer.cluster.liveness.process_end import FAILED, PEER_LOST, REFUSED, end_process
from trainer.core.arguments import require
from trainer.core.received_text import printable, received

_MARGIN = 0.25  # of the limit: for reports to be sent, read and looked at, and for the diagnosis to get around
_MISSED_HEARTBEATS = 4  # are enough where something is known to be wrong
_JOIN_SECS = 1.0
_LINGER_SECS = 0.5
_KEYS = "trainer/watchdog/"
_HAS_ENDED = "its process has ended"
# Gloo's errors come as ValueError where the CPU ran the collective in the call, and as JaxRuntimeError otherwise.
_PEER_ERRORS = re.compile(r"\b(Gloo|NCCL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED)\b|Connection (closed|reset)")


class Watchdog:
    """Ends this process with exit code 75 when another one of the job is gone, or when the job does not go on.

    Before that it says on stderr which worker is the cause, at which step, what it did and for how long, and prints the
    Python stack of this process's main thread. See `diagnose` for what is noticed. That a process has ended is noticed
    at once, see `PeerConnections`; all else takes between three quarters of `timeout_secs` and all of it, if the
    machine is not overloaded. With one process it does nothing.

    Daemon threads do it, one of which only talks with JAX's coordinator, so that the others are not held up. They need
    Python's lock: code that holds it for `timeout_secs` is taken for a process that is gone. The watchdog begins at
    once, and ends with `stop`, or when the process does.

    Args:
      timeout_secs: within which to notice that a process is silent, or the job stands still. Three quarters of it must
        be more than the longest execution and the longest wait for data. Must be the same in all processes. Compiling
        and saving may take ten times as long.
      client: the key-value store that all processes share; JAX's by default.
      process: the index of this process and how many there are; JAX's by default.

    Raises:
      ValueError: if `timeout_secs` is not greater than 0.
      RuntimeError: if there are several processes, but JAX was not started with `jax.distributed.initialize`.

    Attributes:
      timeout_secs: see above.

    >>> watchdog = Watchdog(timeout_secs=60.0)
    >>> watchdog.progress(0, "data")
    >>> watchdog.stop()
    """

    def __init__(self, timeout_secs: float, client: Store | None = None, process: tuple[int, int] | None = None):
        require({"timeout_secs": timeout_secs}, "a number above 0", lambda secs: secs > 0)
        self.timeout_secs = timeout_secs
        self._own_steps = 0  # of custom training loops
        self._timeout_secs = self._silence_secs = (1 - _MARGIN) * timeout_secs
        self._heartbeat_secs = heartbeat_secs(timeout_secs)
        place: tuple[int, int] = process or (jax.process_index(), jax.process_count())
        self._process, self._num_processes = place
        self._name = process_name(self._process)
        self._uses_jax = client is None
        self._peers: PeerConnections | None = None
        self._now = (0, 0, "idle")  # moves, step and phase, in one attribute: they are read by other threads
        self._reports: dict[int, Report] = {}
        self._answers = 0  # of the store
        self._error = ""  # of the store
        self._diagnosis = ""
        self._ended: dict[int, str] = {}  # processes, with the reasons that they gave
        self._lost: set[int] = set()
        self._has_failed = False  # the main thread, whose traceback says more than its stack
        self._stopping, self._leaving = threading.Event(), threading.Event()
        self._has_stopped = False
        self._wake, self._look = threading.Event(), threading.Event()  # of the two threads, before the next heartbeat
        self._threads: list[threading.Thread] = []
        if self._num_processes == 1:
            return
        self._client = client if client is not None else jax_store()
        if self._client is None:
            raise RuntimeError("A watchdog over several processes needs `jax.distributed.initialize` before it.")
        for name, target in (("trainer_watchdog", self._watch), ("trainer_watchdog_reports", self._exchange_reports)):
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            self._threads[-1].start()
        if self._uses_jax:
            host, _ = split_address(coordinator_address())
            self._peers = PeerConnections(host, self._client, self._process, self._num_processes, self._note_end)
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
        self._say_no_more()
        if self._peers is not None:
            self._peers.leave()
        self._look.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECS)

    def _finish(self) -> None:
        """Lets the others know that the script has ended. They may still wait for this process, as JAX does for them.

        This process listens to them until JAX lets it end: should they leave because of it, nothing else would end it.
        """
        self._say_no_more()
        if self._peers is not None:
            self._peers.say_goodbye()

    def _say_no_more(self) -> None:
        self._stopping.set()
        self._wake.set()
        for thread in self._threads[1:]:
            thread.join(_JOIN_SECS)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process is about to end because of an error of its own."""
        if self._peers is not None:
            said = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(".")
            self._peers.leave(f"{self._name} has failed at step {self._now[1]}: {said}.")

    def await_diagnosis(self) -> None:
        """Waits as long as it takes to notice that a process is lost, so that this process ends with the exit code of a
        lost peer.

        For a main thread that failed because a collective did. As it is clear then that something is wrong, four
        missing heartbeats are enough, 20 s at most. Returns if no process is lost.
        """
        if not self._threads or self._stopping.is_set():
            return
        self._has_failed = True
        self._silence_secs = _MISSED_HEARTBEATS * self._heartbeat_secs
        self._threads[0].join(self._silence_secs + 3 * self._heartbeat_secs)
        if self._leaving.is_set():
            self._threads[0].join()

    def _note_end(self, worker: int, reason: str) -> None:
        self._ended[worker] = reason
        self._look.set()

    def _report(self, heartbeat: int) -> Report:
        moves, step, phase = self._now
        return Report(heartbeat, moves, step, "stopped" if self._stopping.is_set() else phase, self._diagnosis)

    def _exchange_reports(self) -> None:
        heartbeat = 0
        while True:
            is_last = self._stopping.is_set()
            heartbeat += 1
            try:
                own = json.dumps(self._report(heartbeat))
                self._client.key_value_set(f"{_KEYS}{self._process}", own, allow_overwrite=True)
                pairs = self._client.key_value_dir_get(_KEYS)
            except Exception as error:  # JAX raises what its C++ says, of several types
                if self._uses_jax and jax_store() is None:
                    self._has_stopped = True  # the script has shut down JAX's runtime: not the coordinator's fault
                    self._stopping.set()
                self._error = printable(str(error).partition("\n")[0])
            else:
                self._reports = {int(key.rpartition("/")[2]): Report(*received(value)) for key, value in pairs}
                self._answers += 1
                self._error = ""
                if any(report.diagnosis for report in self._reports.values()):
                    self._look.set()
            if is_last:
                return
            self._wake.wait(0.1 if self._leaving.is_set() else self._heartbeat_secs)
            self._wake.clear()

    def _watch(self) -> None:
        observer, store = Observer(self._heartbeat_secs), Observer(self._heartbeat_secs)
        heartbeat = 0
        while True:
            self._look.wait(self._heartbeat_secs)
            self._look.clear()
            if self._has_stopped:
                return
            if self._stopping.is_set():
                self._leave_at_the_end()
                continue
            heartbeat += 1
            now = time.monotonic()
            answered = store.observe(now, {0: Report(self._answers, 0, 0, "")})[0].silent_secs
            seen = observer.observe(now, {**self._reports, self._process: self._report(heartbeat)})
            silent = {worker for worker, said in seen.items() if said.silent_secs >= self._silence_secs}
            self._lost = silent | set(self._ended)
            text = next(filter(None, self._ended.values()), None)
            if text is None and self._ended:
                text = lost(min(self._ended), seen, _HAS_ENDED)
            if text is None and answered >= self._silence_secs:
                said = f" ({self._error})" if self._error else ""
                text = lost(0, seen, f"it has not answered for {answered:.1f} s{said}")
            # While process 0 does not answer, nothing can be said of the others.
            if text is None and answered <= 2 * self._heartbeat_secs:
                text = diagnose(seen, self._num_processes, self._timeout_secs, self._silence_secs)
            if text is not None:
                self._leave(text)
                return

    def _leave_at_the_end(self) -> None:
        """Ends the process, whose script has ended, if another process did not wait for that."""
        if self._ended:
            text = next(filter(None, self._ended.values()), None) or lost(min(self._ended), {}, _HAS_ENDED)
            is_own = text.startswith(f"{self._name} ")
            if self._peers is not None:
                self._peers.leave(text)
            linger_secs = _LINGER_SECS if self._process == 0 else 0.0
            end_process(text, f"{self._name} ends", lambda: time.sleep(linger_secs), linger_secs,
                        FAILED if is_own else PEER_LOST, "its script had ended.\n")

    def _leave(self, text: str) -> None:
        """Says why, and ends the process."""
        patience_secs = 2.5 * self._heartbeat_secs

        def linger() -> None:
            # The end of process 0 aborts all others, whose stacks would be missing.
            deadline = time.monotonic() + patience_secs
            while self._process == 0 and time.monotonic() < deadline and not self._all_others_leave():
                time.sleep(0.02)
            time.sleep(_LINGER_SECS if self._process == 0 else _LINGER_SECS / 2)  # they say that they leave, then do

        self._diagnosis = text
        self._leaving.set()
        self._wake.set()
        if self._peers is not None:
            self._peers.leave(text)
        end_process(text, f"{self._name} ends at step {self._now[1]}", linger, patience_secs + _LINGER_SECS,
                    REFUSED if is_repeated(text) else PEER_LOST,
                    place="after the error above.\n" if self._has_failed else None)

    def _all_others_leave(self) -> bool:
        others = set(range(self._num_processes)) - {self._process} - self._lost
        return all(worker in self._reports and self._reports[worker].diagnosis for worker in others)


def is_peer_error(error: BaseException) -> bool:
    """Tells whether an error can come from the loss of another process, as failed collectives raise it.

    >>> is_peer_error(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    True
    """
    kinds = jax.errors.JaxRuntimeError, ValueError, TimeoutError
    return isinstance(error, kinds) and bool(_PEER_ERRORS.search(str(error)))

