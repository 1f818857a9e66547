"""Deliberate crashes: a training is killed at a given moment, resumed, and compared.

Owns when and how a process is killed. A training is a command that writes its result to a file; the processes of a job
are the descendants of the command with their own TF_CONFIG.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

import jax
import numpy as np

from trainer.callbacks import Callback
from trainer.callbacks.base.callback import Logs
from trainer.callbacks.base.train_batch_callback import TrainBatchCallback
from trainer.core import arguments
from trainer.core.calls.entry_points import explains_arguments
from trainer.distribute.cluster import TF_CONFIG

_STEP_VARIABLE = "TRAINER_KILL_AT_STEP"
_VALIDATION_VARIABLE = "TRAINER_KILL_AT_VALIDATION"
_PROCESS_VARIABLE = "TRAINER_KILL_PROCESS"
_SIGNAL_VARIABLE = "TRAINER_KILL_SIGNAL"
# Exit codes of a command for each signal, from itself, a launcher or a shell.
_EXIT_CODES: dict[int, tuple[int, ...]] = {
    signal.SIGKILL: (-signal.SIGKILL, 128 + signal.SIGKILL), signal.SIGTERM: (128 + signal.SIGTERM,)}
_UNFINISHED = re.compile(r"\.step_[0-9]+\..+\.tmp")  # the name of an unfinished checkpoint
_POLL_SECS = 0.001


@dataclasses.dataclass(frozen=True)
class Kill:
    """The moment at which to kill a training; exactly one of `step`, `validation` and `save` is given.

    Attributes:
      step: number of train batches, before anything of the last batch is saved.
      validation: number of validation batches, likewise.
      save: index of a checkpoint, from 0; the kill comes while it is being written.
      delay_secs: seconds after the start of that writing.
      process: index of the process in a job of `trainer.launch` or a `LocalCluster`.
      signal: SIGKILL, or SIGTERM, on which `BackupAndRestore` saves at a boundary soon after and exits with code 143.

    Raises:
      ValueError: if the number of given moments is not 1, or for another signal.
      TypeError: if a number has another type.

    Example:
      >>> Kill(step=7, process=1).process
      1
    """

    step: int | None = None
    validation: int | None = None
    save: int | None = None
    delay_secs: float = 0.0
    process: int = 0
    signal: int = signal.SIGKILL

    def __post_init__(self) -> None:
        given = [name for name in ("step", "validation", "save") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"`Kill` takes one of `step`, `validation` and `save`. Received: {given or 'none'}.")
        arguments.check_count(given[0], getattr(self, given[0]), 0 if given == ["save"] else 1)
        arguments.check_count("process", self.process, 0)
        if self.signal not in _EXIT_CODES:
            raise ValueError(f"`signal` must be SIGKILL or SIGTERM. Received: {self.signal!r}.")


class _KillAt(TrainBatchCallback):
    def __init__(self, train: int | None, test: int | None = None, process: int | None = None,
                 number: int = signal.SIGKILL):
        self._train, self._test, self._process, self._signal = train, test, process, number
        self._validated = self._in_validation = 0  # batches before the current validation, and in it

    def on_train_begin(self, logs=None):
        pass  # the count continues over several `fit` calls

    def on_test_begin(self, logs=None):
        self._validated, self._in_validation = self._validated + self._in_validation, 0

    def next_sync_step(self, phase, batch):  # the same in spared processes: all run the same executions
        super().next_sync_step(phase, batch)
        at, before = (self._train, self._batches_before_epoch) if phase == "train" else (self._test, self._validated)
        last = None if at is None else at - before - 1
        return last if last is not None and last >= batch else None

    def on_execution_end(self, phase, batch, logs=None):
        super().on_execution_end(phase, batch, logs)
        if phase == "test":
            self._in_validation = batch + 1
            self._kill_if(self._validated + batch + 1 == self._test, logs)

    def _after_batches(self, first, last, logs):
        self._kill_if(self._number(last) == self._train, logs)

    def _kill_if(self, is_due: bool, logs: Logs | None) -> None:
        if is_due and self._process in (None, jax.process_index()):
            dict(logs or {})  # waits for the device to finish the batch
            os.kill(os.getpid(), self._signal)


@explains_arguments
def kill_at(step: int | None = None) -> Callback:
    """Returns a callback that kills its own process with SIGKILL, which no code can catch.

    Args:
      step: number of train batches of this process, before anything of the last batch is saved. By default
        `assert_resumes_exactly` decides when, and in which process; outside of it nothing happens.

    Example:
      >>> callbacks = [kill_at()]  # of a `fit` that has `BackupAndRestore` too
    """
    arguments.check_count("step", step, 1, optional=True)
    if step is not None:
        return _KillAt(step)
    train, test = (os.environ.get(name) for name in (_STEP_VARIABLE, _VALIDATION_VARIABLE))
    return _KillAt(None if train is None else int(train), None if test is None else int(test),
                   int(os.environ.get(_PROCESS_VARIABLE, 0)), int(os.environ.get(_SIGNAL_VARIABLE, signal.SIGKILL)))


@explains_arguments
def assert_resumes_exactly(
    command: Sequence[str],
    kills: Sequence[Kill | int],
    result: str = "result.npz",
    timeout_secs: float = 600.0,
    env: dict[str, str] | None = None,
) -> None:
    """Checks that a training gives the same result, to the bit, after each of several crashes.

    The command runs once undisturbed. For each kill, it runs until it is killed, and then again until it ends. Each of
    these trainings has a new working folder, so the command must write there. For kills at a step or in a validation,
    its `fit` needs the callback `kill_at()`.

    The command may launch a job of several processes, with `[sys.executable, "-m", "trainer.launch", "--workers", "2",
    "/path/train.py"]`. Then a single process is killed, the launcher ends the others, and the same command restarts
    all.

    Args:
      command: the command, such as `[sys.executable, "/path/train.py"]`, which saves with `BackupAndRestore`.
      kills: the moments of the kills; a number is a step.
      result: the file of arrays that the command writes at its end with `numpy.savez`; in a job, the chief writes it.
      timeout_secs: maximum seconds per run.
      env: changes to the environment of the runs.

    Raises:
      AssertionError: if a result differs; the message names the kills and the arrays.
      RuntimeError: if a run fails, or ends before it could be killed.

    Example:
      >>> assert_resumes_exactly(  # doctest: +SKIP
      ...     [sys.executable, os.path.abspath("train.py")], [1, 40, Kill(validation=2), Kill(save=1, delay_secs=0.01)])
    """
    env = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory() as root:
        failures = []
        expected = _completed(command, pathlib.Path(root, "undisturbed"), result, timeout_secs, env)
        for number, kill in enumerate(kills):
            kill = kill if isinstance(kill, Kill) else Kill(step=kill)
            folder = pathlib.Path(root, f"killed_{number}")
            _killed(command, folder, kill, timeout_secs, env)
            received = _completed(command, folder, result, timeout_secs, env)
            differing = [name for name in sorted(expected.keys() | received.keys())
                         if name not in expected or name not in received or not _equal(expected[name], received[name])]
            if differing:
                failures.append(f"After {kill} these arrays differ: {', '.join(differing)}.")
            shutil.rmtree(folder)
    if failures:
        raise AssertionError(f"After {len(failures)} of {len(kills)} kills the result differs from an undisturbed "
                             "run. On GPUs a run has the same bits each time only with `compile(deterministic=True)`.\n"
                             + "\n".join(failures))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def _completed(
    command: Sequence[str], folder: pathlib.Path, result: str, timeout_secs: float, env: dict[str, str]
) -> dict[str, np.ndarray]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=env, timeout=timeout_secs, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"The training ended with exit code {done.returncode}:\n{done.stdout}")
    with np.load(folder / result) as arrays:
        return dict(arrays)


def _killed(
    command: Sequence[str], folder: pathlib.Path, kill: Kill, timeout_secs: float, env: dict[str, str]
) -> None:
    folder.mkdir()
    variables = {_STEP_VARIABLE: kill.step, _VALIDATION_VARIABLE: kill.validation, _PROCESS_VARIABLE: kill.process,
                 _SIGNAL_VARIABLE: int(kill.signal)}
    env = env | {name: str(value) for name, value in variables.items() if value is not None}
    with open(folder / "output.txt", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            if kill.save is not None:
                _wait_for_save(process, folder, kill.save, timeout_secs)
                time.sleep(kill.delay_secs)
                _send(process, kill)
            process.wait(timeout_secs)
        finally:
            process.kill()
            process.wait()
        if process.returncode not in _EXIT_CODES[kill.signal]:
            output.seek(0)
            hint = "" if kill.save is not None else " Is the callback `kill_at()` given to `fit`?"
            hint += f" Is there a process {kill.process}?" if kill.process else ""
            raise RuntimeError(f"The training was not killed at {kill}, but ended with exit code {process.returncode}."
                               f"{hint}\n{output.read()}")


def _wait_for_save(process: subprocess.Popen, folder: pathlib.Path, count: int, timeout_secs: float) -> None:
    seen: set[str] = set()
    deadline = time.monotonic() + timeout_secs
    while process.poll() is None and time.monotonic() < deadline:
        for parent, folders, _ in os.walk(folder):  # skips files that vanish in the meantime
            seen |= {os.path.join(parent, name) for name in folders if _UNFINISHED.fullmatch(name)}
        if len(seen) > count:
            return
        time.sleep(_POLL_SECS)
    if process.poll() is None:
        raise RuntimeError(f"There was no save number {count}, counted from 0, within {timeout_secs} s.")


def _send(process: subprocess.Popen, kill: Kill) -> None:
    pid = _job_processes(process.pid).get(kill.process) if process.poll() is None else None
    with contextlib.suppress(ProcessLookupError):  # it has just ended, as the exit code will show
        if pid is not None:
            os.kill(pid, kill.signal)


def _job_processes(command: int) -> dict[int, int]:
    """Returns the process ids of the job that a command has launched, by index; its own as 0 without a job."""
    inherited = _tf_config(command)
    found: dict[int, int] = {}
    generation = [command]
    while generation and not found:
        generation = [child for parent in generation for child in _children(parent)]
        configs = [(pid, _tf_config(pid)) for pid in generation]
        found = {json.loads(config)["task"]["index"]: pid for pid, config in configs if config not in (b"", inherited)}
    return found or {0: command}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, pathlib.Path(path).read_text().split())
    return found


def _tf_config(pid: int) -> bytes:
    name = TF_CONFIG.encode() + b"="
    try:
        variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process is gone, or the system has no such file
        return b""
    return next((variable.removeprefix(name) for variable in variables if variable.startswith(name)), b"")
