"""Watches a job to its end: when its processes are to stop, and which of their exit codes is the job's.

Owns these decisions. How processes are started and ended is the job's matter.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from trainer.launch.job import Job

PEER_LOST = 75  # as MultiWorkerMirroredStrategy exits when another process is gone
REFUSED = 2
PREEMPTED = 143
TIMED_OUT = 124  # as `timeout` of the shell has it

FAILED, TIMEOUT, INTERRUPTED, TERMINATED = "failed", "timeout", "interrupted", "terminated"

_POLL_SECS = 0.05
_FAILURE_GRACE_SECS = 5.0  # from SIGTERM to SIGKILL for the others, once one has failed
_PEER_LOST_WAIT_SECS = 5.0  # for the process that caused it to say what was wrong with it


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
      exit_code: the job's, 0 if it succeeded; 128 + s for a process that signal s killed.
      worker: whose exit code it is, if it is a worker's.
      reason: why the processes that still ran were ended: `FAILED`, `TIMEOUT`, `INTERRUPTED` by SIGINT or
        `TERMINATED` by SIGTERM; None if they ended by themselves.
      killed: the workers that did not end in time then, and were killed.
    """

    exit_code: int
    worker: int | None = None
    reason: str | None = None
    killed: tuple[int, ...] = ()


def supervise(
    job: Job, timeout_secs: float | None = None, grace_secs: float = 30.0,
    failure_grace_secs: float = _FAILURE_GRACE_SECS, requests: list[int] | None = None,
) -> Outcome:
    """Waits until all processes of a job have ended, and ends them when a process fails.

    Args:
      job: the job.
      timeout_secs: how long it may take; None for any time.
      grace_secs: how long processes may take to end after SIGINT or SIGTERM of `requests`, before they are killed.
      failure_grace_secs: the same after the SIGTERM that they get when another failed or time is over.
      requests: signals that this process received, SIGINT and SIGTERM, to which a signal handler appends. The first is
        forwarded; after it, or when the job is ending already, SIGINT kills. They are taken out as they are obeyed.
    """
    requests = [] if requests is None else requests
    watch = _Watch(job, grace_secs, failure_grace_secs)
    deadline = float("inf") if timeout_secs is None else time.monotonic() + timeout_secs
    while not job.finished:
        watch.note_ends(job.wait(_POLL_SECS))
        while requests:
            watch.obey(requests.pop(0))
        if time.monotonic() > deadline and watch.reason is None:
            watch.end(TIMEOUT, signal.SIGTERM, failure_grace_secs)
        watch.end_what_is_due()
    return watch.outcome()


class _Watch:
    def __init__(self, job: Job, grace_secs: float, failure_grace_secs: float):
        self.job, self.grace_secs, self.failure_grace_secs = job, grace_secs, failure_grace_secs
        self.reason: str | None = None
        self.failures: list[int] = []  # workers that failed by themselves, the first one first
        self.first_failure_at = 0.0
        self.kill_at = float("inf")
        self.killed: set[int] = set()

    def note_ends(self, ended: Sequence[int]) -> None:
        if self.reason is not None:
            return
        failed = [worker for worker in ended if self.job.codes[worker] != 0]
        if failed and not self.failures:
            self.first_failure_at = time.monotonic()
        # Survivors of a killed process fail within milliseconds of it, so both may be seen at once.
        self.failures += sorted(failed, key=lambda worker: (self.code(worker) >= 0, worker))

    def obey(self, number: int) -> None:
        if number == signal.SIGINT and self.reason is not None:
            self.kill()
            self.reason = INTERRUPTED
        elif number == signal.SIGINT:
            self.end(INTERRUPTED, number, self.grace_secs)
        elif self.reason is None:
            self.end(TERMINATED, number, self.grace_secs)
        elif self.reason == FAILED:
            self.reason = TERMINATED  # they are ending already; this only says that nothing is to start again

    def end_what_is_due(self) -> None:
        now = time.monotonic()
        if self.failures and self.reason is None and now >= self.first_failure_at + self.patience_secs():
            self.end(FAILED, signal.SIGTERM, self.failure_grace_secs)
        if now > self.kill_at and self.job.running:
            self.kill()

    def patience_secs(self) -> float:
        """Returns for how long the others may go on after the first failure."""
        codes = {self.code(worker) for worker in self.failures}
        if any(_is_cause(code) for code in codes):
            return 0.0
        return self.grace_secs if codes == {PREEMPTED} else _PEER_LOST_WAIT_SECS  # preempted ones save, all of them

    def end(self, reason: str, number: int, grace_secs: float) -> None:
        self.reason = reason
        self.job.send(number, to_helpers=number == signal.SIGINT)
        self.kill_at = time.monotonic() + grace_secs

    def kill(self) -> None:
        self.killed.update(self.job.running)
        self.job.kill()
        self.kill_at = float("inf")

    def code(self, worker: int) -> int:
        code = self.job.codes[worker]
        assert code is not None, "the worker has ended"
        return code

    def outcome(self) -> Outcome:
        return self._outcome()._replace(reason=self.reason, killed=tuple(sorted(self.killed)))

    def _outcome(self) -> Outcome:
        codes = {worker: self.code(worker) for worker in range(len(self.job.codes))}
        own = self._outcome_of(self.failures, codes)
        if own is not None and _is_cause(codes[own]):
            return self._of_worker(own)
        if self.reason == TIMEOUT:
            return Outcome(TIMED_OUT)
        if not any(codes.values()):
            return Outcome(0)
        if self.reason == INTERRUPTED:
            return Outcome(128 + signal.SIGINT)
        if self.reason == TERMINATED:
            return self._outcome_of_termination(codes)
        assert own is not None, "a process that was not ended by us has failed"
        return self._of_worker(own)

    def _outcome_of_termination(self, codes: dict[int, int]) -> Outcome:
        saved = {worker for worker, code in codes.items() if code in (PREEMPTED, -signal.SIGTERM)}
        failed = self._outcome_of([worker for worker in codes if worker not in saved | self.killed], codes)
        if failed is not None and _is_cause(codes[failed]):
            return self._of_worker(failed)
        if self.killed:
            return self._of_worker(min(self.killed))
        if saved or failed is None:
            return Outcome(PREEMPTED)
        return self._of_worker(failed)

    @staticmethod
    def _outcome_of(workers: Sequence[int], codes: dict[int, int]) -> int | None:
        """Returns the worker among these whose failure counts: a cause, or else a worker that lost a peer."""
        failed = [worker for worker in workers if codes[worker] != 0]
        for counts in (_is_cause, lambda code: code != PREEMPTED, lambda code: True):
            found = next((worker for worker in failed if counts(codes[worker])), None)
            if found is not None:
                return found
        return None

    def _of_worker(self, worker: int) -> Outcome:
        code = self.code(worker)
        return Outcome(PEER_LOST if code == -signal.SIGABRT else 128 - code if code < 0 else code, worker)


def describe_end(code: int) -> str:
    """Returns what an exit code says of a process.

    >>> describe_end(1), describe_end(-9)
    ('failed with exit code 1', 'was killed by SIGKILL')
    """
    if code == -signal.SIGABRT:
        return f"was aborted (SIGABRT), as JAX's runtime does when it loses a peer: taken for exit code {PEER_LOST}"
    if code < 0:
        known = -code in set(signal.Signals)
        return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    kind = {PEER_LOST: " (it lost a peer)", PREEMPTED: " (preempted)"}.get(code, "")
    return f"failed with exit code {code}{kind}"


def _is_cause(code: int) -> bool:
    """Tells whether a failure can be the first, and not what another process's failure led to."""
    return code not in (0, PEER_LOST, -signal.SIGABRT, PREEMPTED)
