"""Crashes on purpose: killing a training at a given moment, and comparing what it gives once it was resumed.

Owns how and when a process is killed. It sees a training as a command that writes its result to a file.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer import checks
from trainer.callbacks import Callback
from trainer.callbacks.train_batch_callback import TrainBatchCallback

_STEP_VARIABLE = "TRAINER_KILL_AT_STEP"
_VALIDATION_VARIABLE = "TRAINER_KILL_AT_VALIDATION"
_UNFINISHED = re.compile(r"\.step_[0-9]+\..+\.tmp")  # the name of a checkpoint that is being written
_POLL_SECS = 0.001


@dataclasses.dataclass(frozen=True)
class Kill:
    """When to kill a training; exactly one of the first three is given.

    Attributes:
      step: after so many train batches, before anything is saved of the last one.
      validation: likewise, after so many batches of validations.
      save: while a checkpoint is being written, that many after the first.
      delay_secs: for how long it has been written then.
    """

    step: int | None = None
    validation: int | None = None
    save: int | None = None
    delay_secs: float = 0.0

    def __post_init__(self) -> None:
        given = [name for name in ("step", "validation", "save") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"`Kill` takes one of `step`, `validation` and `save`. Received: {given or 'none'}.")
        checks.check_count(given[0], getattr(self, given[0]), 0 if given == ["save"] else 1)


class _KillAt(TrainBatchCallback):
    def __init__(self, train: int | None, test: int | None):
        self._train, self._test = train, test
        self._validated = self._in_validation = 0  # batches before the validation that is running, and in it

    def on_train_begin(self, logs=None):
        pass  # one `fit` after another, the batches of a process are counted on

    def on_test_begin(self, logs=None):
        self._validated, self._in_validation = self._validated + self._in_validation, 0

    def next_look(self, phase, batch):
        super().next_look(phase, batch)
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

    def _kill_if(self, is_due: bool, logs: Any) -> None:
        if is_due:
            dict(logs or {})  # waits for the device: the batch is done
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at(step: int | None = None) -> Callback:
    """Returns a callback that kills its own process with SIGKILL, which no code can catch.

    Args:
      step: after how many train batches of this process, before anything is saved of the last one. Without it
        `assert_resumes_exactly` says when, and outside of it nothing happens.

    Example:
      >>> callbacks = [kill_at()]  # of a `fit` that has `BackupAndRestore` too
    """
    checks.check_count("step", step, 1, optional=True)
    if step is not None:
        return _KillAt(step, None)
    train, test = (os.environ.get(name) for name in (_STEP_VARIABLE, _VALIDATION_VARIABLE))
    return _KillAt(None if train is None else int(train), None if test is None else int(test))


def assert_resumes_exactly(
    command: Sequence[str],
    kills: Sequence[Kill | int],
    result: str = "result.npz",
    timeout_secs: float = 600.0,
    env: dict[str, str] | None = None,
) -> None:
    """Checks that a training gives the same result, to the bit, after each of several crashes.

    The command is run once undisturbed, and then once for each kill until it is killed, and again until it ends. Each
    time it has a new working folder, so it must write there. To be killed at a step or in a validation, its `fit` needs
    the callback `kill_at()`.

    Args:
      command: the command, such as `[sys.executable, "/path/train.py"]`, which saves with `BackupAndRestore`.
      kills: when to kill it; a number is that of a step.
      result: the file with the numbers that it writes at its end with `numpy.savez`.
      timeout_secs: how long each run may take.
      env: changes to the environment of the runs.

    Raises:
      AssertionError: if a result differs; it names the kills and the arrays.
      RuntimeError: if a run fails, or was over before it could be killed.

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
        raise AssertionError(f"After {len(failures)} of {len(kills)} kills the result is not that of an undisturbed "
                             "run.\n" + "\n".join(failures))


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
    variables = {_STEP_VARIABLE: kill.step, _VALIDATION_VARIABLE: kill.validation}
    env = env | {name: str(value) for name, value in variables.items() if value is not None}
    with open(folder / "output.txt", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            if kill.save is not None:
                _wait_for_save(process, folder, kill.save, timeout_secs)
                time.sleep(kill.delay_secs)
                process.kill()
            process.wait(timeout_secs)
        finally:
            process.kill()
            process.wait()
        if process.returncode != -signal.SIGKILL:
            output.seek(0)
            hint = "" if kill.save is not None else " Is the callback `kill_at()` given to `fit`?"
            raise RuntimeError(f"The training was not killed at {kill}, but ended with exit code {process.returncode}."
                               f"{hint}\n{output.read()}")


def _wait_for_save(process: subprocess.Popen, folder: pathlib.Path, count: int, timeout_secs: float) -> None:
    seen: set[str] = set()
    deadline = time.monotonic() + timeout_secs
    while process.poll() is None and time.monotonic() < deadline:
        for parent, folders, _ in os.walk(folder):  # which passes over what vanishes meanwhile
            seen |= {os.path.join(parent, name) for name in folders if _UNFINISHED.fullmatch(name)}
        if len(seen) > count:
            return
        time.sleep(_POLL_SECS)
    if process.poll() is None:
        raise RuntimeError(f"There was no save number {count}, counted from 0, within {timeout_secs} s.")
