"""Reports of a job's processes, and the diagnosis that follows from them.

Owns the choice of the process that is the cause of a stalled job. The watchdog sends the reports, and acts on a
diagnosis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.distribute.cluster.description.process_names import process_name

# Phases of a process. All others, such as "data", are its own work.
AGREEMENT = "agreement"  # of all processes, after their last steps, on how to continue
WAITING = {"device", AGREEMENT}  # for the result of an execution, so for all processes
MAYBE_WAITING = {"device", "host", AGREEMENT}  # "host" starts executions, and CPUs run collectives in the call
START = "start"  # of JAX, before which no process moves
OUTSIDE = {"idle", "stopped"}  # of any run: the next action is unknown, so that there is no limit unless awaited
PATIENT = {"compile", "checkpoint", "idle"}  # may take `PATIENCE` times as long
PATIENCE = 10.0

_DIFFERENT_EPOCHS = ("The data of all processes must have the same number of batches, and callbacks must stop all "
                     "processes in the same way. To start again would not help.")
_HEARTBEATS_PER_TIMEOUT = 16
_MAX_HEARTBEAT_SECS = 5.0


class Report(NamedTuple):
    """The report of a process.

    Attributes:
      heartbeat: value that changes with each report.
      moves: number of calls of `Watchdog.progress`.
      step: step of the last of these calls.
      phase: phase of the last of these calls.
      diagnosis: reason for the end of the process; empty if it continues.
    """

    heartbeat: int
    moves: int
    step: int
    phase: str
    diagnosis: str = ""

    @classmethod
    def from_message(cls, values: Any) -> Report | None:
        """Returns the report that another process has sent as a list; None if the form is wrong."""
        kinds = [int, int, int, str, str]
        is_report = isinstance(values, list) and [type(value) for value in values] == kinds
        return cls(*values) if is_report else None


class Seen(NamedTuple):
    """The knowledge of a process about another process, or about itself.

    Attributes:
      report: last report.
      silent_secs: seconds since the last observed change of the heartbeat.
      still_secs: seconds since the last observed move of the process.
    """

    report: Report
    silent_secs: float
    still_secs: float

    def __str__(self) -> str:
        return f'step {self.report.step}, "{self.report.phase}"'


class Observer:
    """Tracks the time since each process was heard and moved, by this process's clock only.

    Time during which this process itself was suspended does not count for the others.

    Args:
      heartbeat_secs: expected seconds between two observations.
    """

    def __init__(self, heartbeat_secs: float):
        self._max_gap_secs = 2 * heartbeat_secs
        self._looked_at: float | None = None
        self._clock = 0.0
        self._known: dict[int, tuple[Report, float, float]] = {}  # with the times of its last heartbeat and move

    def hear(self, now: float, worker: int, report: Report) -> None:
        """Records a report at a time in seconds of a monotonic clock."""
        self._advance(now)
        old, heard, moved = self._known.get(worker, (report, self._clock, self._clock))
        if old.heartbeat != report.heartbeat:
            heard = self._clock
        if (old.moves, old.step, old.phase) != (report.moves, report.step, report.phase):
            moved = self._clock
        self._known[worker] = report, heard, moved

    def seen(self, now: float) -> dict[int, Seen]:
        """Returns the knowledge about each process that was heard."""
        self._advance(now)
        return {worker: Seen(report, self._clock - heard, self._clock - moved)
                for worker, (report, heard, moved) in self._known.items()}

    def _advance(self, now: float) -> None:
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._clock += min(gap, self._max_gap_secs)
        self._looked_at = now


def diagnose(
    seen: Mapping[int, Seen], num_processes: int, timeout_secs: float, silence_secs: float | None = None
) -> str | None:
    """Returns the fault of the job, or None if there is no fault yet.

    A diagnosis of another process is adopted, because that process ends and would seem to be the cause. Otherwise a
    process is lost if it has been silent for `silence_secs`, unless it has stopped its watchdog. Processes have stalled
    if all have begun, and none has moved for `timeout_secs`, or a process waits for its device for that long. The cause
    is then a process with its own work, such as "data", or else a process that compiles, saves or is between two runs,
    or else a process that may be waiting itself; among several, the process at the lowest step. A process that saves
    counts as waiting after another process has left. A process that compiles, saves or is between two runs has
    `PATIENCE` times the limit, and so do the processes that wait for it. If all wait, but an epoch has ended in some
    processes and continues in others, the data differ. This is diagnosed as soon as the reports are of the same moment.

    Args:
      seen: knowledge about each process.
      num_processes: number of processes.
      timeout_secs: limit for a stalled job, in seconds.
      silence_secs: limit for a silent process, in seconds; `timeout_secs` by default.

    >>> at_work, waits = Report(9, 80, 7, "data"), Report(9, 81, 7, "device")
    >>> diagnose({0: Seen(waits, 0.5, 4.0), 1: Seen(at_work, 0.5, 4.5)}, 2, timeout_secs=4.0)
    'worker 1 has stalled at step 7, in "data" for 4.5 s, while worker 0 waits (step 7, "device").'
    """
    for process in seen.values():
        if process.report.diagnosis:
            return process.report.diagnosis
    heard = {worker: process for worker, process in seen.items() if process.report.phase != "stopped"}
    quietest = max(heard, key=lambda worker: heard[worker].silent_secs, default=None)
    if quietest is None:
        return None
    silent_secs = heard[quietest].silent_secs
    if silent_secs >= (silence_secs or timeout_secs):
        return lost(quietest, seen, f"nothing was heard of it for {silent_secs:.1f} s")
    if len(seen) < num_processes or any(process.report.moves == 0 for process in heard.values()):
        return None
    if silent_secs > 2 * heartbeat_secs(timeout_secs):
        return None  # it may turn out to be lost, and then has not stalled
    if all(process.still_secs >= min(timeout_secs, 4 * heartbeat_secs(timeout_secs)) for process in seen.values()):
        text = _different_epochs(seen)
        if text is not None:
            return text
    return _stall(seen, timeout_secs)


def lost(worker: int, seen: Mapping[int, Seen], why: str) -> str:
    """Returns the diagnosis of a lost process, with its position in the last report.

    >>> lost(0, {0: Seen(Report(9, 80, 7, "data"), 2.5, 3.0)}, "its process has ended")
    'worker 0, which coordinates the job, is lost: its process has ended. It was at step 7, in "data", up to 2.5 s ago.'
    """
    name = f"{process_name(worker)}{', which coordinates the job,' if worker == 0 else ''}"
    report, silent_secs, _ = seen[worker]
    if report.phase == START:
        return f"{name} is lost: {why}, while JAX started."
    return f'{name} is lost: {why}. It was at step {report.step}, in "{report.phase}", up to {silent_secs:.1f} s ago.'


def late_start(seen: Mapping[int, Seen], timeout_secs: float) -> str | None:
    """Returns the diagnosis of processes in which JAX starts too late; None if there are none.

    >>> late_start({1: Seen(Report(9, 0, 0, "start"), 0.1, 60.0)}, 60.0)
    'JAX has not started within 60 s in worker 1.'
    """
    late = [worker for worker, process in sorted(seen.items())
            if process.report.phase == START and process.still_secs >= timeout_secs]
    names = ", ".join(map(process_name, late))
    return f"JAX has not started within {timeout_secs:g} s in {names}." if late else None


def _stall(seen: Mapping[int, Seen], timeout_secs: float) -> str | None:
    still = {worker: process for worker, process in seen.items() if process.still_secs >= timeout_secs}
    # A process that has ended no longer saves, so processes that save together with it wait forever.
    has_left = any(process.report.phase == "stopped" for process in seen.values())
    waits = WAITING | {"checkpoint"} if has_left else WAITING
    waiting = [worker for worker, process in still.items() if process.report.phase in waits]
    maybe_waiting = [worker for worker, process in still.items() if process.report.phase in MAYBE_WAITING]
    if len(still) == len(seen):
        suspects = set(still) - set(waiting)
        places = {(process.report.step, process.report.phase) for process in still.values()}
        if not suspects or (len(maybe_waiting) == len(still) > 1 and len(places) == 1):
            return _all_wait(still)
    elif waiting:
        last = max(seen[worker].report.step for worker in waiting)
        suspects = {worker for worker, process in still.items()
                    if worker not in waiting and process.report.step <= last}
    else:
        return None
    cause = min(suspects, key=lambda worker: _rank_of_suspect(still[worker]), default=None)
    if cause is None:
        return None
    process, others = still[cause], [worker for worker in waiting or maybe_waiting if worker != cause]
    is_due = process.still_secs >= timeout_secs * (PATIENCE if process.report.phase in PATIENT else 1.0)
    if not is_due or (process.report.phase in OUTSIDE and not others):
        return None
    name, at = process_name(cause), f"at step {process.report.step}"
    text = f'{name} has stalled {at}, in "{process.report.phase}" for {process.still_secs:.1f} s'
    if process.report.phase == "stopped":
        text = f"{name} has left the job: its script has ended, {at}"
    if others:
        text += f", while {process_name(others[0])} waits ({still[others[0]]})"
    return f"{text}."


def _different_epochs(seen: Mapping[int, Seen]) -> str | None:
    """Returns the diagnosis of epochs that have ended in some processes, while others have begun further steps."""
    if any(process.report.phase not in MAYBE_WAITING for process in seen.values()):
        return None
    step, worker = min((process.report.step, worker) for worker, process in seen.items())
    ahead = [other for other, process in seen.items() if process.report.step > step]
    if seen[worker].report.phase != AGREEMENT or not ahead:
        return None
    return (f"an epoch has ended in {process_name(worker)} after step {step}, while {process_name(ahead[0])} has begun "
            f"step {seen[ahead[0]].report.step} of it with further batches: the data of {process_name(worker)} have "
            f"ended early, or a callback has stopped it alone. {_DIFFERENT_EPOCHS}")


def is_repeated(diagnosis: str) -> bool:
    """Returns whether the same fault would follow a restart of the job."""
    return diagnosis.endswith(_DIFFERENT_EPOCHS)


def _all_wait(still: Mapping[int, Seen]) -> str:
    places = ", ".join(f"{process_name(worker)} at step {process.report.step}"
                       for worker, process in sorted(still.items()))
    secs = min(process.still_secs for process in still.values())
    return (f"all workers wait for their devices, for {secs:.1f} s: {places}. A device or a connection hangs, or an "
            "execution takes longer than the watchdog's limit.")


def _rank_of_suspect(process: Seen) -> tuple[int, int, float]:
    """Returns a rank, lowest for the most likely cause."""
    phase = process.report.phase
    kind = 1 if phase in PATIENT | OUTSIDE else 2 if phase in MAYBE_WAITING else 0
    return kind, process.report.step, -process.still_secs


def heartbeat_secs(timeout_secs: float) -> float:
    """Returns the interval of reports, in seconds.

    >>> heartbeat_secs(4.0), heartbeat_secs(300.0)
    (0.25, 5.0)
    """
    return min(timeout_secs / _HEARTBEATS_PER_TIMEOUT, _MAX_HEARTBEAT_SECS)
