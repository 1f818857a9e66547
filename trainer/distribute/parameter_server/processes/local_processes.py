"""Engine of processes on this machine, which communicate through sockets in a folder that only this user may open.

A process ends with its parent, even if the parent is killed: it reads a pipe from the parent to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.distribute.parameter_server.processes.engine import Handle
from trainer.distribute.parameter_server.processes.failures import ProcessLostError
from trainer.distribute.parameter_server.processes.frames import receive, send
from trainer.distribute.parameter_server.processes.wire import Packed, pack

_MODULE = f"{__package__}.local_process"
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")
_POLL = 0.02  # seconds between two attempts to reach a starting process
_END = 5.0  # seconds for a process to end


class LocalHandle(Handle):
    """A process on this machine with a socket at `address`; `process` is None if another process started it."""

    def __init__(self, name: str, address: str, process: subprocess.Popen[bytes] | None = None):
        self.name = name
        self._address, self._process = address, process
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_killed = False

    def __reduce__(self) -> Any:
        return LocalHandle, (self.name, self._address)

    def _answer(self, method: str, packed: Packed, timeout: float | None) -> tuple[str, Packed]:
        deadline = None if timeout is None else time.monotonic() + timeout
        connection = self._connection(deadline)
        try:
            send(connection, method, packed)
            if deadline is not None and not select.select([connection], [], [], deadline - time.monotonic())[0]:
                raise TimeoutError(f"{self.name} has not answered within {timeout:g} s.")
            answer = receive(connection)
        except TimeoutError:
            connection.close()
            raise
        except (EOFError, OSError) as error:
            connection.close()
            raise self._lost() from error
        with self._lock:
            if self._is_killed:
                connection.close()
            else:
                self._idle.append(connection)
        return answer

    def kill(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()
            self._process.wait(_END)
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with self._lock:
            self._is_killed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _connection(self, deadline: float | None) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._address)
                return connection
            except FileNotFoundError:  # a process that has just started has no socket yet
                connection.close()
                if self._process is not None and self._process.poll() is not None:
                    raise self._lost() from None
            except OSError as error:
                connection.close()
                raise self._lost() from error
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} has not started in time.")
            time.sleep(_POLL)

    def _lost(self) -> ProcessLostError:
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        how = "" if code is None else f" (exit code {code})" if code >= 0 else f" (killed by signal {-code})"
        return ProcessLostError(f"{self.name} has ended{how}.")


class LocalProcesses:
    """Starts processes on this machine."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="trainer-ps-")
        self._handles: list[LocalHandle] = []
        self._lock = threading.Lock()
        self._count, self._is_closed = 0, False

    def start(self, name: str, role: str, make: Callable[[], Any]) -> LocalHandle:
        with self._lock:
            if self._is_closed:
                raise ProcessLostError(f"{name} cannot be started: the cluster is closed.")
            self._count += 1
            address = os.path.join(self._folder, str(self._count))
            # A separate session: Ctrl-C reaches only the chief, which then ends the others.
            process = subprocess.Popen([sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, start_new_session=True,
                                       env={**os.environ, **environment_of(role)})
            handle = LocalHandle(name, address, process)
            self._handles.append(handle)
        assert process.stdin is not None, "a pipe"
        settings = {"address": address, "make": pack(make)[0].data.hex()}
        with contextlib.suppress(BrokenPipeError):  # it has ended; the first call reports this
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        return handle

    def close(self, code: int = 0) -> None:
        with self._lock:
            self._is_closed = True
            for handle in self._handles:
                handle.kill()
            self._handles = []
        shutil.rmtree(self._folder, ignore_errors=True)


def environment_of(role: str) -> dict[str, str]:
    """Returns the environment variables of a "worker" or "ps" process that differ from the chief's."""
    # Modules of the user's script are found on machines with the same folders.
    environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                   "XLA_FLAGS": _DEVICE_COUNT.sub("", os.environ.get("XLA_FLAGS", "")).strip()}
    if role == "ps":
        environment["JAX_PLATFORMS"] = "cpu"
    elif "JAX_PLATFORMS" in os.environ:
        environment["JAX_PLATFORMS"] = os.environ["JAX_PLATFORMS"]
    # Several processes share an accelerator, so none may take all of its memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return environment
