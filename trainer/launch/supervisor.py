"""Watches a job to its end, and decides when its processes stop and which of their exit codes is the job's.

The job starts and ends processes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from trainer.launch.job import Job

PEER_LOST = 75  # exit code of MultiWorkerMirroredStrategy when another process is gone
REFUSED = 2
PREEMPTED = 143
TIMED_OUT = 124  # as in the shell command `timeout`

FAILED, TIMEOUT, INTERRUPTED, TERMINATED = "failed", "timeout", "interrupted", "terminated"

_POLL_SECS = 0.05
_FAILURE_GRACE_SECS = 5.0  # from SIGTERM to SIGKILL for the others, after a failure
_PEER_LOST_WAIT_SECS = 5.0  # for the process that caused it to report its error


class Outcome(NamedTuple):
    """The end of a job.

    Attributes:
      exit_code: the exit code of the job, 0 if it succeeded; 128 + s for a process that signal s killed.
      worker: the worker with this exit code, if any.
      reason: the reason why running processes were ended: `FAILED`, `TIMEOUT`, `INTERRUPTED` by SIGINT or `TERMINATED`
        by SIGTERM; None if all ended by themselves.
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
      timeout_secs: maximum seconds; None for no limit.
      grace_secs: seconds that processes have to exit after SIGINT or SIGTERM of `requests`, before they are killed.
      failure_grace_secs: the same after the SIGTERM for a failure of another process or a timeout.
      requests: signals that this process received, SIGINT and SIGTERM, appended by a signal handler. The first is
        forwarded; after it, or when the job is ending already, SIGINT kills. Handled signals are removed.
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
        self.failures: list[int] = []  # workers that failed by themselves, the first failure first
        self.first_failure_at = 0.0
        self.kill_at = float("inf")
        self.killed: set[int] = set()

    def note_ends(self, ended: Sequence[int]) -> None:
        if self.reason is not None:
            return
        failed = [worker for worker in ended if self.job.codes[worker] != 0]
        if failed and not self.failures:
            self.first_failure_at = time.monotonic()
        # Survivors of a killed process fail within milliseconds, so both may be seen at once.
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
            self.reason = TERMINATED  # already ending; only prevents a restart

    def end_what_is_due(self) -> None:
        now = time.monotonic()
        if self.failures and self.reason is None and now >= self.first_failure_at + self.patience_secs():
            self.end(FAILED, signal.SIGTERM, self.failure_grace_secs)
        if now > self.kill_at and self.job.running:
            self.kill()

    def patience_secs(self) -> float:
        """Returns the seconds that the others may continue after the first failure."""
        codes = {self.code(worker) for worker in self.failures}
        if any(_is_cause(code) for code in codes):
            return 0.0
        return self.grace_secs if codes == {PREEMPTED} else _PEER_LOST_WAIT_SECS  # preempted processes all save

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
        """Returns the worker whose failure counts: a cause, or else a worker that lost a peer."""
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
    """Returns a description of an exit code.

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
    """Returns whether a failure can be the first, rather than the consequence of another process's failure."""
    return code not in (0, PEER_LOST, -signal.SIGABRT, PREEMPTED)
