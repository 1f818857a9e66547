"""Ties the processes of a job to the life of its launcher, which may be killed before it can end them.

Owns the two small programs for this. It runs as a script, by its path and before all other code of a worker, so it
imports nothing of the trainer.

  parent_death.py tie PID PROGRAM ARGUMENTS...   becomes the program, which the kernel kills once PID has ended
  parent_death.py guard JOB_ID                   reads process groups, a line each; kills them at the end of input
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

JOB_ID_VARIABLE = "TRAINER_JOB_ID"
DONE = "done"  # the last line if the launcher has ended everything itself
_PR_SET_PDEATHSIG = 1
_ROUNDS, _PAUSE_SECS = 50, 0.01


def tie(parent: int, command: list[str]) -> None:
    """Replaces this process by a program that is killed when its parent ends.

    The signal is not SIGTERM, which JAX and many programs survive.

    Args:
      parent: the process that started this process. If it has already ended, this process exits.
      command: the program's path and its arguments.
    """
    import ctypes  # slower than the rest of this file

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == parent:  # otherwise it has already ended, and no signal will come
        os.execv(command[0], command)


def kill_group(group: int) -> None:
    """Sends SIGKILL to the remaining processes of a group, if any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_all_of(job_id: str) -> None:
    """Kills every process with this job id in its initial environment, in any session."""
    marker = f"{JOB_ID_VARIABLE}={job_id}".encode()
    for _ in range(_ROUNDS):  # a process may have forked while the list was read
        found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
                 if pid != os.getpid() and marker in _environment(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECS)


def guard(job_id: str) -> None:
    """Waits for the end of stdin, when all writers have ended, and ends the job, unless the last line is `DONE`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().split()
    if lines[-1:] == [DONE]:
        return
    for group in map(int, filter(str.isdecimal, lines)):
        kill_group(group)
    kill_all_of(job_id)


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # another user's process, or gone
        return []


if __name__ == "__main__":
    if sys.argv[1] == "tie":
        tie(int(sys.argv[2]), sys.argv[3:])
    else:
        guard(sys.argv[2])
