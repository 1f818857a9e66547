"""A job on this machine: the worker processes of a cluster, their environment and their output.

Owns the start and the end of processes, so that none is left behind. The supervisor decides when to end them. Does not
import JAX: a launcher must start at once and hold no device.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.launch import gpus, output, parent_death

OnLines = Callable[[int, str, Sequence[bytes]], None]

_PARENT_DEATH = os.path.abspath(parent_death.__file__)
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")
_KEPT_LINES = 200  # of the stderr of each worker
_READ_BYTES = 2**16
_DRAIN_SECS = 1.0  # for output after the last process ended; an unreachable process may hold the pipe
_FIRST_PORT = 10_000
_TRIES = 50  # for each port


class Job:
    """The processes of a cluster. Use it in a `with` statement, which kills the running processes at its end.

    The kernel kills the workers when the thread that made the job ends, so this thread must outlive the job.

    Args:
      command: the arguments of `python`: a script, or `-m` and a module, or `-c` and a program; and its arguments.
      workers: number of processes.
      devices_per_worker: number of GPUs of each worker, or without GPUs the number of CPU devices that JAX simulates in
        each; None for equal shares of all GPUs, or for the number of CPU devices in the environment.
      env: changes to the environment of all workers.
      on_lines: receives each worker's output, as (worker, "stdout" or "stderr", lines), in the thread that calls
        `wait`.

    Raises:
      ValueError: if there are GPUs, but fewer than the workers need.

    Attributes:
      codes: each worker's exit code, None while it runs; -s if signal s killed it.
      last_lines: the last lines of each worker's stderr.
    """

    def __init__(
        self, command: Sequence[str], workers: int, devices_per_worker: int | None = None,
        env: Mapping[str, str] | None = None, on_lines: OnLines = output.show,
    ):
        self.codes: list[int | None] = []
        self.last_lines = [collections.deque[bytes](maxlen=_KEPT_LINES) for _ in range(workers)]
        self._on_lines = on_lines
        self._job_id = secrets.token_hex(16)
        environments = _environments(workers, self._job_id, devices_per_worker, env or {})
        self._selector = selectors.DefaultSelector()
        self._drained_by = float("inf")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _PARENT_DEATH, "guard", self._job_id], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != parent_death.JOB_ID_VARIABLE})
        try:
            for environment in environments:
                self._start(command, environment)
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> bool:
        """Whether all processes have ended and all their output was forwarded."""
        return not self.running and (not self._selector.get_map() or time.monotonic() > self._drained_by)

    @property
    def running(self) -> list[int]:
        """The indices of the running workers."""
        return [worker for worker, code in enumerate(self.codes) if code is None]

    def wait(self, secs: float) -> list[int]:
        """Waits for output, which it forwards, and for exits of processes.

        Args:
          secs: maximum seconds to wait.

        Returns:
          The workers that ended since the last call. Their child processes are ended with them.
        """
        for key, _ in self._selector.select(secs):
            self._read(key)
        return self._reap()

    def send(self, number: int, to_helpers: bool = False) -> None:
        """Sends a signal to all running workers and, with `to_helpers`, to their child processes, like Ctrl-C."""
        for worker in self.running:
            pid = self._processes[worker].pid  # not reaped, so the id is not reused
            (os.killpg if to_helpers else os.kill)(pid, number)

    def kill(self) -> None:
        """Kills all workers and their child processes at once."""
        self.send(signal.SIGKILL, to_helpers=True)

    def close(self) -> None:
        """Ends all remaining processes."""
        self.kill()
        for worker in self.running:
            self.codes[worker] = self._processes[worker].wait()
        parent_death.kill_all_of(self._job_id)
        for key in list(self._selector.get_map().values()):
            self._close_pipe(key.fileobj)
        self._selector.close()
        self._tell_guard(parent_death.DONE)
        self._guard.stdin.close()  # type: ignore[union-attr]
        self._guard.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        # -I and -S apply to this script only, which then replaces itself by an ordinary `python -u`.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _PARENT_DEATH, "tie", str(os.getpid()), sys.executable, "-u", *command],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True)
        worker = len(self._processes)
        self._processes.append(process)
        self.codes.append(None)
        self._tell_guard(str(process.pid))
        for name in ("stdout", "stderr"):
            pipe = getattr(process, name)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (worker, name, output.LineSplitter()))

    def _tell_guard(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # if it was killed, only the kernel's signal is left
            self._guard.stdin.write(f"{line}\n".encode())  # type: ignore[union-attr]

    def _read(self, key: selectors.SelectorKey) -> None:
        worker, name, splitter = key.data
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return
        lines = splitter.feed(data) if data else splitter.rest()
        if not data:
            self._close_pipe(key.fileobj)
        if name == "stderr":
            self.last_lines[worker].extend(lines)
        if lines:
            self._on_lines(worker, name, lines)

    def _close_pipe(self, pipe: Any) -> None:
        self._selector.unregister(pipe)
        pipe.close()

    def _reap(self) -> list[int]:
        ended = []
        for worker in self.running:
            process = self._processes[worker]
            # Checks without reaping, so that neither its id nor its group id is reused yet.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                parent_death.kill_group(process.pid)
                self.codes[worker] = process.wait()
                ended.append(worker)
        if ended and not self.running:
            parent_death.kill_all_of(self._job_id)
            self._drained_by = time.monotonic() + _DRAIN_SECS
        return ended


def free_ports(count: int) -> list[int]:
    """Returns unused ports of this machine.

    They are below the kernel's range for outgoing connections, so that none is taken by chance before the worker binds
    it.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            limit = int(file.read().split()[0])
    except OSError:
        limit = 0
    below = range(_FIRST_PORT, max(limit, _FIRST_PORT))
    candidates = random.SystemRandom().sample(below, min(len(below), _TRIES * count))
    found: list[int] = []
    with contextlib.ExitStack() as sockets:
        while len(found) < count:
            # All stay bound until the last is found, so that they are distinct. 0 lets the kernel choose.
            bound = sockets.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                bound.bind(("", candidates.pop() if candidates else 0))
                found.append(bound.getsockname()[1])
    return found


def _environments(
    workers: int, job_id: str, devices_per_worker: int | None, changes: Mapping[str, str]
) -> list[dict[str, str]]:
    common = {**os.environ, **changes, parent_death.JOB_ID_VARIABLE: job_id}
    devices: list[dict[str, str]] = [{}] * workers
    if found := gpus.visible_gpus(common):
        if workers > 1 or devices_per_worker is not None:
            parts = gpus.divide(found, workers, devices_per_worker)
            devices = [{gpus.VISIBLE: ",".join(part)} for part in parts]
            if devices_per_worker is None and (rest := len(found) % workers):
                output.say(f"{rest} of {len(found)} GPUs stay unused, as each of {workers} workers gets as many.")
    elif devices_per_worker is not None:
        others = _DEVICE_COUNT.sub("", common.get("XLA_FLAGS", "")).split()
        common["XLA_FLAGS"] = " ".join([*others, f"--xla_force_host_platform_device_count={devices_per_worker}"])
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(workers)]}
    return [{**common, **own, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
            for index, own in enumerate(devices)]
