"""A cluster of processes on this machine for tests: a function runs in each, and returns its result.

Owns the transfer of a function, its arguments and its results: as a name and as plain values in files, never pickled.
The launcher starts and ends processes.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from trainer.core import arguments, errors, plain
from trainer.engine.saving.arrays import safetensors_file
from trainer.launch import output
from trainer.launch.job import Job
from trainer.launch.supervisor import TIMEOUT, describe_end, supervise

_PROGRAM = "import sys; sys.path[:] = {path!r}; from trainer.testing import local_cluster; local_cluster._work()"
_DUMP_SECS = 0.5  # for workers to dump their tracebacks before they are killed
_STILL_RUNNING = b"Timeout ("  # start of faulthandler's traceback


class WorkerError(RuntimeError):
    """A worker of a `LocalCluster` has failed.

    Attributes:
      worker: its index.
      exit_code: the exit code of its process; -s if signal s killed it.
      traceback: the text of the traceback, or the end of its stderr.
    """

    def __init__(self, worker: int, exit_code: int, traceback: str, message: str):
        super().__init__(message)
        self.worker, self.exit_code, self.traceback = worker, exit_code, traceback


class LocalCluster:
    """Runs a function in each of several fresh processes that form a cluster on this machine.

    Each process has a `TF_CONFIG` with its position in the cluster, and the working folder, import path and environment
    of this process; JAX uses its CPU. Their output appears with a prefix. All processes have ended when `run` returns.

    Args:
      n: number of processes.
      devices_per_worker: number of CPU devices that JAX simulates in each.
      timeout_secs: maximum seconds per run, including the start of the processes.
      env: changes to the environment of the processes.

    >>> cluster = LocalCluster(2)
    >>> cluster.run(strategies.total, np.ones(3))  # doctest: +SKIP
    [6.0, 6.0]
    """

    def __init__(self, n: int, devices_per_worker: int = 1, timeout_secs: float = 120.0,
                 env: Mapping[str, str] | None = None):
        arguments.check_count("n", n, 1)
        arguments.check_count("devices_per_worker", devices_per_worker, 1)
        if not timeout_secs > 0:
            raise ValueError(f"`timeout_secs` must be greater than 0. Received: {timeout_secs}.")
        self._workers, self._devices_per_worker, self._timeout_secs = n, devices_per_worker, timeout_secs
        self._env = {"JAX_PLATFORMS": "cpu", **(env or {})}

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function in every process, with the same arguments.

        Args:
          function: a function of a module that the processes can import too, or of the running script, which then needs
            `if __name__ == "__main__"` around its main code.
          *args: plain values: None, bool, int, float, str, bytes, arrays, and lists, tuples and dicts of these.

        Returns:
          The return values, which are also plain values, in the order of the workers. JAX arrays become NumPy arrays.

        Raises:
          WorkerError: if a process fails; with the traceback of the process that failed first. The others are ended.
          TimeoutError: if the run takes too long. The message has the traceback of each process.
          TypeError: if an argument is not a plain value, or `function` is not a function.
          ValueError: if `function` is not at the top level of a module, such as a lambda or a nested function.
        """
        module, qualname, file = _place_of(function)
        with tempfile.TemporaryDirectory(prefix="trainer_cluster_") as root:
            folder = pathlib.Path(root)
            deadline = time.monotonic() + self._timeout_secs
            call = {"module": module, "qualname": qualname, "file": file, "args": list(args), "deadline": deadline}
            _write(folder / "call", call, "call")
            command = ["-c", _PROGRAM.format(path=sys.path), root]
            with Job(command, self._workers, self._devices_per_worker, self._env) as job:
                outcome = supervise(job, deadline + _DUMP_SECS - time.monotonic(), failure_grace_secs=0.0)
            if outcome.worker is not None:
                raise self._error(folder, job, outcome.worker)
            if outcome.reason == TIMEOUT:
                raise self._timeout(job)
            missing = [worker for worker in range(self._workers) if not _result(folder, worker).exists()]
            if missing:
                raise self._error(folder, job, missing[0])
            return [_read(_result(folder, worker)) for worker in range(self._workers)]

    def _error(self, folder: pathlib.Path, job: Job, worker: int) -> WorkerError:
        code = job.codes[worker]
        assert code is not None, "the job has ended"
        report = _report(folder, worker)
        text = report.read_text(encoding="utf-8") if report.exists() else _text(
            output.end_of(list(job.last_lines[worker])))
        end = describe_end(code) if code else "ended with exit code 0 before the function returned"
        return WorkerError(worker, code, text, f"Worker {worker} of {self._workers} {end}.\n{text}".rstrip())

    def _timeout(self, job: Job) -> TimeoutError:
        late = [worker for worker, code in enumerate(job.codes) if code != 0]
        message = f"After {self._timeout_secs:g} s these workers had not ended: {', '.join(map(str, late))}."
        for worker in late:
            lines = list(job.last_lines[worker])
            begins = [number for number, line in enumerate(lines) if line.startswith(_STILL_RUNNING)]
            where = lines[begins[-1] + 1:] if begins else output.end_of(lines)
            message += f"\nWorker {worker} was here:\n{_text(where)}" if where else ""
        return TimeoutError(message)


def _work() -> None:
    """Runs a worker; the argument of this program is the folder of the call."""
    folder, worker = pathlib.Path(sys.argv[1]), json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    try:
        call = _read(folder / "call")
        faulthandler.dump_traceback_later(max(call["deadline"] - time.monotonic(), 1e-3))
        function = _imported(call["module"], call["qualname"], call["file"])
        _write(_result(folder, worker), function(*call["args"]), "result")
        faulthandler.cancel_dump_traceback_later()
    except BaseException as error:
        text = traceback.format_exc()
        _report(folder, worker).write_text(text, encoding="utf-8", errors="backslashreplace")
        print(text, file=sys.stderr, flush=True)
        # A normal exit would wait for the others, in the shutdown barrier of JAX's runtime.
        code = error.code if isinstance(error, SystemExit) else 1
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def _place_of(function: Callable[..., Any]) -> tuple[str, str, str | None]:
    """Returns a function's module, its name in the module, and the module's file."""
    name, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not isinstance(name, str) or not isinstance(qualname, str):
        raise errors.wrong_type("function", function, "a function of a module")
    module = sys.modules.get(name)
    if "<" in qualname or module is None or _found(module, qualname) is not function:
        raise ValueError(f"`function` must be one that other processes find under its name in a module. Received: "
                         f"{qualname!r} of {name!r}. Define it at the top level of a file, and give data as "
                         "arguments.")
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if name == "__main__" and spec is not None:  # with `python -m`
        name = spec.name
    return name, qualname, None if file is None else os.path.abspath(file)


def _found(module: types.ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _imported(name: str, qualname: str, file: str | None) -> Callable[..., Any]:
    try:
        if name == "__main__":
            raise ModuleNotFoundError(name=name)
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The other process's main script, or a test file, which pytest imports without adding its folder to the path.
        if file is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        name = "__trainer_main__" if name == "__main__" else name
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return _found(module, qualname)


def _write(path: pathlib.Path, value: object, name: str) -> None:
    try:
        jsonable, arrays = plain.encode(value, name)
    except TypeError as error:
        error.add_note("A `LocalCluster` passes arguments and results as a checkpoint would hold them.")
        raise
    safetensors_file.save_arrays(path.with_suffix(".safetensors"), arrays)
    path.write_text(json.dumps(jsonable), encoding="utf-8")


def _read(path: pathlib.Path) -> Any:
    with safetensors_file.read_arrays(path.with_suffix(".safetensors")) as arrays:
        return plain.decode(json.loads(path.read_text(encoding="utf-8")), arrays)


def _result(folder: pathlib.Path, worker: int) -> pathlib.Path:
    return folder / f"result_{worker}"


def _report(folder: pathlib.Path, worker: int) -> pathlib.Path:
    return folder / f"error_{worker}"


def _text(lines: list[bytes]) -> str:
    return b"\n".join(lines).decode(errors="replace")
