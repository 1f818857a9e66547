"""Engine of Ray's actors, on the nodes of a cluster. The only file that names `ray`.

Ray's processes listen on all interfaces of their machines, even for a cluster of one machine. They answer only holders
of the cluster's token. The token is made once per process, because Ray keeps the first, and is in a file that only this
user may read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.distribute.parameter_server.processes.engine import Handle, Host
from trainer.distribute.parameter_server.processes.failures import ProcessLostError
from trainer.distribute.parameter_server.processes.local_processes import environment_of
from trainer.distribute.parameter_server.processes.tf_config_cluster import Chief, resource_of
from trainer.distribute.parameter_server.processes.wire import Packed, pack

LOCAL = "local"  # the address of a new cluster on this machine
_OBJECT_STORE = 512 * 2**20  # bytes, of a cluster that is started here
_HEAD_SECS = 60.0  # maximum time to reach a head
_CALLS_AT_ONCE = 64  # of an actor; more workers may call it


class RayHost(Host):
    """A `Host` as an actor; it copies arguments, because Ray passes read-only views of shared memory."""

    def answer(self, method: str, arguments: Packed) -> tuple[str, Packed]:
        return super().answer(method, _owned(arguments))


class RayHandle(Handle):
    """A Ray actor."""

    def __init__(self, name: str, actor: Any):
        self.name = name
        self._actor = actor

    def __reduce__(self) -> Any:
        return RayHandle, (self.name, self._actor)

    def _answer(self, method: str, packed: Packed, timeout: float | None) -> tuple[str, Packed]:
        import ray

        try:
            kind, answer = ray.get(self._actor.answer.remote(method, packed), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self.name} has not answered within {timeout:g} s.") from None
        except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError, ray.exceptions.ObjectLostError,
                ray.exceptions.OutOfMemoryError) as error:
            raise ProcessLostError(f"{self.name} has ended. {_reason(error)}") from None
        except ray.exceptions.RayTaskError as error:  # an error of Ray: a `Host` answers with errors of functions
            raise ProcessLostError(f"{self.name} cannot be used: {error}") from None
        return kind, _owned(Packed(*answer))

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # the actor, or all of Ray, is gone
            ray.kill(self._actor, no_restart=True)


class RayCluster:
    """Starts actors on a Ray cluster.

    Args:
      address: "host:port" of a running cluster; `LOCAL` starts a cluster on this machine, which ends with this object.
      chief: the chief's address in TF_CONFIG, if the tasks of TF_CONFIG form the cluster; it replaces `address`.
      tasks: the names of the other tasks; each has the actor of its name.

    Raises:
      ImportError: if Ray is not installed.
      RuntimeError: if Ray cannot be started or reached.
    """

    def __init__(self, address: str = LOCAL, chief: str | None = None, tasks: Sequence[str] = ()):
        _use_token()
        try:
            import ray
        except ImportError:
            raise ImportError("`address` needs Ray: pip install 'trainer-jax[ray]'. Without it, leave `address` out: "
                              "workers and servers are then processes of this machine.") from None
        self._ray = ray
        self._starts = not ray.is_initialized()
        self._handles: list[RayHandle] = []
        self._chief = None if chief is None else Chief(chief, tasks)
        if self._chief is not None:
            _begin(self._chief.address)
            self._chief.wait_for_nodes(ray.cluster_resources)
        elif self._starts:
            _begin(address)

    def start(self, name: str, role: str, make: Callable[[], Any]) -> RayHandle:
        place = {} if self._chief is None else {resource_of(name): 0.001}
        if not place.keys() <= self._ray.available_resources().keys():
            raise ProcessLostError(f"{name} is not there: its machine or its script has ended.")
        # Ray would hide the accelerators from an actor that has not requested them.
        environment = {**environment_of(role), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        actor = self._ray.remote(RayHost).options(
            num_cpus=0, resources=place, scheduling_strategy="SPREAD", max_restarts=0, max_concurrency=_CALLS_AT_ONCE,
            runtime_env={"env_vars": environment}).remote(pack(make)[0])
        handle = RayHandle(name, actor)
        self._handles.append(handle)
        return handle

    def close(self, code: int = 0) -> None:
        for handle in self._handles:
            handle.kill()
        self._handles = []
        if self._starts and self._ray.is_initialized():
            self._ray.shutdown()
        if self._chief is not None:
            self._chief.close(code)
            self._chief = None


def _owned(packed: Packed) -> Packed:
    return Packed(packed.data, [np.array(buffer) for buffer in packed.buffers])


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _begin(address: str) -> None:
    """Connects this process to Ray, and starts Ray if `address` is `LOCAL`; a head that just started gets a minute."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    if address != LOCAL:
        try:
            _connect(address, quiet)
        except Exception as error:
            raise RuntimeError(f"The Ray cluster at {address!r} is not reached: {_reason(error)} Start it with the "
                               "token of this process, as RAY_AUTH_TOKEN_PATH says, and give the address of its "
                               "head.") from error
        return
    for is_last in (False, True):
        before = _children()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # children run other programs at once
                ray.init(address=LOCAL, include_dashboard=False, object_store_memory=_OBJECT_STORE,
                         num_cpus=os.cpu_count(), **quiet)
            return
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            _end(_children() - before)
            if is_last:
                raise RuntimeError(f"Ray could not be started on this machine: {_reason(error)} It gives itself 30 s, "
                                   "and a busy machine takes longer: end other work, or leave `address` out for local "
                                   "processes.") from error


def _connect(address: str, options: Mapping[str, Any]) -> None:
    import ray

    deadline = time.monotonic() + _HEAD_SECS
    while True:
        try:
            ray.init(address=address, **options)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _use_token() -> None:
    """Makes Ray require a token, before it is imported, unless the environment names a token."""
    if "ray" in sys.modules:
        return
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ.keys() & {"RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"}:
        return
    folder = tempfile.mkdtemp(prefix="trainer-ray-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "token")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = path


def _children() -> set[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(os.getpid())]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return {int(pid) for pid in listed.stdout.split()}


def _end(processes: set[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)

