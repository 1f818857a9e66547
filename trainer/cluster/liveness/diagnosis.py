"""What the processes of a job say of themselves, and what follows from it.

Owns who is to blame when a job does not go on. Who says it when and to whom, and what becomes of it, is the watchdog's
matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer.cluster.description.process_names import process_name

# What a process does by what it says. All else, such as "data", is work of its own.
WAITING = {"device"}  # for the result of an execution, so for all processes
DISPATCHING = {"host", "train", "validation", "test", "predict"}  # may wait too: CPUs run collectives in the call
OUTSIDE = {"idle", "stopped"}  # of any run: nobody can tell what comes, so that nobody has to hurry unless awaited
PATIENT = {"compile", "checkpoint", "idle"}  # may take `PATIENCE` times as long
PATIENCE = 10.0

_BEATS_PER_TIMEOUT = 16
_MAX_BEAT_SECS = 5.0


class Report(NamedTuple):
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


class Seen(NamedTuple):
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
    waiting itself; among several the one of the lowest step. Who saves waits too, once a process has left. While a
    process compiles, saves or is between two runs, it has `PATIENCE` times as long before it is to blame, and so have
    those that wait for it.

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
        return lost(worker, seen, f"nothing was heard of it for {heard[worker].silent_secs:.1f} s")
    if worker is None or len(seen) < num_processes or any(one.report.moves == 0 for one in heard.values()):
        return None
    if heard[worker].silent_secs > 2 * beat_secs(timeout_secs):
        return None  # it may turn out to be lost, and then has not stalled
    return _stall(seen, timeout_secs)


def lost(worker: int, seen: Mapping[int, Seen], why: str) -> str:
    """Returns what is to be said of a process that is lost.

    >>> lost(0, {0: Seen(Report(9, 80, 7, "data"), 0.5, 0.5)}, "its process has ended")
    'worker 0, which coordinates the job, is lost: its process has ended. It was at step 7, in "data".'
    """
    name = f"{process_name(worker)}{', which coordinates the job,' if worker == 0 else ''}"
    report = seen[worker].report if worker in seen else None
    place = "" if report is None else f' It was at step {report.step}, in "{report.phase}".'
    return f"{name} is lost: {why}.{place}"


def ended(worker: int, seen: Mapping[int, Seen]) -> str:
    """Returns what is to be said of a process that has ended without a word.

    >>> ended(1, {1: Seen(Report(9, 80, 7, "data"), 0.5, 0.5)})
    'worker 1 is lost: its process has ended, 0.5 s after it was last heard. It was at step 7, in "data".'
    """
    heard = f", {seen[worker].silent_secs:.1f} s after it was last heard" if worker in seen else ""
    return lost(worker, seen, f"its process has ended{heard}")


def _stall(seen: Mapping[int, Seen], timeout_secs: float) -> str | None:
    still = {worker: one for worker, one in seen.items() if one.still_secs >= timeout_secs}
    # What has ended saves nothing any more, so that those wait forever who save together with it.
    has_left = any(one.report.phase == "stopped" for one in seen.values())
    waits = WAITING | {"checkpoint"} if has_left else WAITING
    waiting = [worker for worker, one in still.items() if one.report.phase in waits]
    maybe_waiting = [worker for worker, one in still.items() if one.report.phase in WAITING | DISPATCHING]
    if len(still) == len(seen):
        suspects = set(still) - set(waiting)
        if not suspects or (len(maybe_waiting) == len(still) > 1
                            and len({(one.report.step, one.report.phase) for one in still.values()}) == 1):
            places = [f"{process_name(worker)} at step {one.report.step}" for worker, one in sorted(still.items())]
            return (f"all workers wait for their devices, for {min(one.still_secs for one in still.values()):.1f} s: "
                    + ", ".join(places)
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
    name, at = process_name(culprit), f"at step {one.report.step}"
    text = f'{name} has stalled {at}, in "{one.report.phase}" for {one.still_secs:.1f} s'
    if one.report.phase == "stopped":
        text = f"{name} has left the job: its script has ended, {at}"
    if others:
        text += f", while {process_name(others[0])} waits ({still[others[0]]})"
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
