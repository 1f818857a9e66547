"""The local launcher of clusters: `python -m trainer.launch --workers 2 train.py` runs a script as two workers.

Owns the command line and the decision to restart a job. Does not import JAX.

Exit codes: 0 if all workers succeeded; otherwise the code of the worker that failed first, 128 + s if signal s killed
it. 75 means that a worker lost a peer, which counts only if no worker failed in another way; 2 a rejected
configuration; 124 a timeout; 130 Ctrl-C; 143 that the workers were preempted and have saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.launch import output
from trainer.launch.gpus import memory_settings
from trainer.launch.job import Job
from trainer.launch.supervisor import FAILED, PEER_LOST, REFUSED, TIMEOUT, Outcome, describe_end, supervise

_MAX_WORKERS = 1024
_NUMBER_OF_PROCESSES = ("n", "np", "nproc", "nproc_per_node", "nproc-per-node", "num_processes", "num-processes")
_DESCRIPTION = """\
Runs a Python script as the workers of a cluster on this machine. Each gets TF_CONFIG and its part of the GPUs, and its
output a prefix. When a worker fails, the others are ended."""


def run(
    command: Sequence[str],
    workers: int,
    devices_per_worker: int | None = None,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
    timeout_secs: float | None = None,
    grace_secs: float = 30.0,
    memory_fraction: float | None = None,
) -> int:
    """Runs a Python program as the workers of a cluster on this machine, and returns the job's exit code.

    Each worker gets `TF_CONFIG` with free ports of this machine, and the same `TRAINER_JOB_ID`. Their output appears
    line by line on stdout and stderr, with a prefix. When a worker fails, the others receive SIGTERM, and SIGKILL five
    seconds later; then the end of its stderr is shown again. In the main thread, Ctrl-C, SIGTERM and SIGHUP are
    forwarded to the workers; a second Ctrl-C kills them. All processes end, even if the launcher is killed; child
    processes of workers end with them.

    The GPUs of `CUDA_VISIBLE_DEVICES`, by default all GPUs of the machine, are divided among the workers, unless
    `JAX_PLATFORMS` names no GPUs.

    Args:
      command: the arguments of `python`: a script, or `-m` and a module; and its arguments.
      workers: number of processes.
      devices_per_worker: number of GPUs of each worker; None for equal shares, with a remainder unused. Without GPUs,
        the number of CPU devices that JAX simulates in each; None leaves that to `XLA_FLAGS`.
      restarts: maximum number of restarts of all workers, on other ports, after a failure. Exit code 2, which means a
        rejected configuration, a timeout, and signals to this process end the job at once.
      env: changes to the environment of the workers.
      timeout_secs: seconds, in total, after which the workers are ended. None for no limit.
      grace_secs: seconds that workers have to exit after a signal, before they are killed.
      memory_fraction: fraction of the memory of each of its GPUs that a worker allocates when JAX starts; 0 to allocate
        on demand. None for the setting in the environment, or JAX's default, 0.75.

    Returns:
      0 if all workers succeeded; otherwise the exit code of the worker that failed first, 128 + s if signal s killed
      it. 75 (a peer was lost; also for SIGABRT) counts only if no worker failed in another way; 124 after a timeout;
      130 after Ctrl-C; 143 if the workers were preempted and have saved.

    Raises:
      TypeError: if a number has another type.
      ValueError: if `command` is empty, a number is out of range, or there are GPUs, but fewer than the workers need.
      FileNotFoundError: if there is no such script.

    >>> run(["train.py", "--learning-rate", "0.1"], workers=2, devices_per_worker=4)  # doctest: +SKIP
    0
    """
    _check(command, workers, devices_per_worker, restarts, timeout_secs, grace_secs, memory_fraction)
    env = {**(env or {}), **memory_settings(memory_fraction)}
    deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
    with _signals() as requests:
        for restart in range(restarts + 1):
            remaining_secs = None if deadline is None else deadline - time.monotonic()
            outcome = _run_once(command, workers, devices_per_worker, env, remaining_secs, grace_secs, requests)
            again = outcome.exit_code not in (0, REFUSED) and outcome.reason in (None, FAILED) and not requests
            if not again or restart == restarts:
                break
            output.say(f"Starting all workers again (restart {restart + 1} of {restarts}).")
    if again and not restarts and (outcome.exit_code == PEER_LOST or outcome.exit_code > 128):  # not by the script
        output.say("To go on after such an end, use `--restarts N` and the callback `BackupAndRestore`, or run "
                   "the command again.")
    return outcome.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit code.

    Args:
      arguments: the arguments of the command line, by default of this process.
    """
    parser = _parser()
    own, command = _split(sys.argv[1:] if arguments is None else arguments)
    known = parser._option_string_actions
    for option in own:
        name = option.partition("=")[0]
        if name[:1] == "-" and name.strip("-")[:1].isalpha() and name not in known:
            hint = " The number of processes is `--workers N`." if name.strip("-") in _NUMBER_OF_PROCESSES else ""
            parser.error(f"unknown option {name!r}.{hint} Known options: {', '.join(known)}.")
    options = parser.parse_args(own)
    if command in ([], ["-m"]):
        parser.error("there is nothing to run. Give a script, or -m and a module, after the options.")
    try:
        code = run(command, options.workers, options.devices_per_worker, options.restarts, None, options.timeout,
                   options.grace, options.memory_fraction)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    try:
        sys.stdout.flush()
    except OSError:  # no reader is left, and Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run_once(
    command: Sequence[str], workers: int, devices_per_worker: int | None, env: Mapping[str, str] | None,
    timeout_secs: float | None, grace_secs: float, requests: list[int],
) -> Outcome:
    output_is_lost = False

    def show(worker: int, stream: str, lines: Sequence[bytes]) -> None:
        nonlocal output_is_lost
        try:
            if not output_is_lost:
                output.show(worker, stream, lines)
        except OSError:  # the terminal or the pipe is gone: ends the workers, which may save
            output_is_lost = True
            requests.append(signal.SIGTERM)

    with Job(command, workers, devices_per_worker, env, show) as job:
        outcome = supervise(job, timeout_secs, grace_secs, requests=requests)
    if outcome.killed:
        names = ", ".join(map(str, outcome.killed))
        output.say(f"Killed, as they did not end in time: {names}.")
    if outcome.worker is not None:
        _tell_of_failure(job, outcome.worker)
    elif outcome.reason == TIMEOUT:
        output.say("The time is over.")
    return outcome


def _tell_of_failure(job: Job, worker: int) -> None:
    lines, code, workers = output.end_of(list(job.last_lines[worker])), job.codes[worker], len(job.codes)
    assert code is not None, "the job has ended"
    if lines and workers > 1:  # later output of others may hide it
        output.say(f"The end of worker {worker}'s stderr:")
        with contextlib.suppress(OSError):
            output.show(worker, "stderr", lines)
    output.say(f"Worker {worker} of {workers} {describe_end(code)}.")


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that would end this process."""
    received: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            recorded = signal.SIGTERM if number == signal.SIGHUP else number
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # with `nohup`, or in the background
                before[number] = signal.signal(number, lambda *_, recorded=recorded: received.append(recorded))
    try:
        yield received
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)


def _check(
    command: Sequence[str], workers: int, devices_per_worker: int | None, restarts: int, timeout_secs: float | None,
    grace_secs: float, memory_fraction: float | None,
) -> None:
    if isinstance(command, str) or not command:
        raise ValueError("`command` must be a list: a script, or '-m' and a module, and its arguments.")
    for argument, number, minimum in (("workers", workers, 1), ("devices_per_worker", devices_per_worker, 1),
                                      ("restarts", restarts, 0)):
        if number is None and argument == "devices_per_worker":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"`{argument}` must be a whole number. Received: a value of type {type(number).__name__}.")
        if number < minimum:
            raise ValueError(f"`{argument}` must be at least {minimum}. Received: {number}.")
    if workers > _MAX_WORKERS:
        raise ValueError(f"`workers` must be at most {_MAX_WORKERS} on one machine. Received: {workers}.")
    for argument, secs in (("timeout_secs", timeout_secs), ("grace_secs", grace_secs)):
        if secs is not None and not secs >= 0:
            raise ValueError(f"`{argument}` must be at least 0. Received: {secs}.")
    if memory_fraction is not None and not 0 <= memory_fraction <= 1:
        raise ValueError(f"`memory_fraction` must be from 0 to 1. Received: {memory_fraction}.")
    if not command[0].startswith("-") and not os.path.exists(command[0]):
        raise FileNotFoundError(f"There is no script {command[0]!r} in {os.getcwd()!r}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer-launch", description=_DESCRIPTION, allow_abbrev=False,
        usage="%(prog)s --workers N [options] (SCRIPT | -m MODULE) [ARGUMENT ...]")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--devices-per-worker", type=int, metavar="K",
                        help="how many GPUs each gets, by default an equal part of all; without GPUs, how many CPU "
                             "devices JAX simulates in each")
    parser.add_argument("--memory-fraction", type=float, metavar="F",
                        help="what part of its GPUs' memory each takes at its start (JAX's default: 0.75); 0 for as "
                             "much as it needs, when it needs it")
    parser.add_argument("--restarts", type=int, default=0, metavar="R",
                        help="how often to start all again after a failure, unless with exit code 2; by default never")
    parser.add_argument("--timeout", type=float, metavar="SECS", help="end all after so long, with exit code 124")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECS",
                        help="how long workers may take to end after Ctrl-C or SIGTERM (default: 30)")
    return parser


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Separates the launcher's own options from the command, whose options `argparse` would parse, or drop its `--`."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] not in ("-m", "--"):
        position += 1 if "=" in arguments[position] or arguments[position] in ("-h", "--help") else 2
    command = list(arguments[position:])
    return arguments[:position], command[1:] if command[:1] == ["--"] else command
