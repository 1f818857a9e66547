"""Ray cluster of the tasks of TF_CONFIG, which all run the same script.

The chief listens on its address of TF_CONFIG. The other tasks connect to it, say their name, receive the address of
Ray's head, make their machine a node, and end when the chief ends, with its exit code. This connection carries only
these; Ray's own token authenticates the nodes. Connections that do not say the name of a task are few, and do not last.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.distribute.cluster import (
    ClusterError,
    ClusterTimeout,
    Connection,
    NotOurs,
    Wait,
    accepted,
    connect,
    ready,
    split_address,
    why_unreachable,
)
from trainer.distribute.parameter_server.processes.failures import EXIT_CODE

LOGGER = logging.getLogger(__name__)

ROLES = ("worker", "ps")
_MODULE = f"{__package__}.ray_node"
_PATIENCE = 300.0  # seconds until all tasks have met
_POLL = 0.2  # seconds between two looks at something awaited
_SAY = 15.0  # seconds between two messages about missing tasks
_HELLO_SECS = 10.0  # a connection that has not identified its task by then is dropped
_MAX_UNKNOWN = 16  # connections that have not said so; the oldest are dropped, as a task says it at once
_OBJECT_STORE = "268435456"  # bytes of a node, for arguments and results of functions


def resource_of(name: str) -> str:
    """Returns the Ray resource of a task's node, from the task's name, such as "worker 0"."""
    return "trainer_" + re.sub(r"\W", "_", name)


def check_roles(cluster: Mapping[str, Sequence[str]]) -> None:
    """Raises ClusterError if a cluster lacks a chief, workers, parameter servers, a token or Ray, and names all."""
    needs = {"chief": "a chief, which hands out the work", "worker": "workers", "ps": "parameter servers"}
    missing = [role for role in needs if not cluster.get(role)]
    errors = []
    if missing:
        errors.append(f"A ParameterServerStrategy needs {' and '.join(needs[role] for role in missing)}, but "
                      f"TF_CONFIG's cluster has only: {', '.join(cluster)}. Add to 'cluster' a list for each of: "
                      f"{', '.join(map(repr, missing))}.")
    if not (os.environ.get("RAY_AUTH_TOKEN_PATH") or os.environ.get("RAY_AUTH_TOKEN")):
        errors.append("The tasks of a cluster need a common token, without which anybody on the network could run "
                      "code on it. Write 64 random hexadecimal digits to a file that only you may read, the same "
                      "on all machines, and set RAY_AUTH_TOKEN_PATH to its path.")
    if importlib.util.find_spec("ray") is None:
        errors.append("The tasks of a cluster communicate by Ray, which cannot be imported: `pip install "
                      "'trainer-jax[ray]'` on all machines.")
    if errors:
        raise ClusterError(" ".join(errors))


def _start_node(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "PYTHONPATH": os.pathsep.join(
        path or os.getcwd() for path in sys.path)}
    return subprocess.Popen([sys.executable, "-m", _MODULE, f"--object-store-memory={_OBJECT_STORE}",
                             "--disable-usage-stats", *arguments],
                            stdin=subprocess.PIPE, env=environment, start_new_session=True)


def _end_node(node: subprocess.Popen[bytes]) -> None:
    assert node.stdin is not None, "a pipe"
    node.stdin.close()
    node.wait()


def _patience() -> Wait:
    return Wait(_PATIENCE, lambda line: print(line, file=sys.stderr, flush=True), _SAY)


def _pause(wait: Wait, line: str, error: str) -> None:
    """Waits a moment, and says `line` periodically; raises `ClusterTimeout(error)` after too long."""
    if wait.remaining_secs < 0:
        raise ClusterTimeout(error)
    wait.say_if_due(lambda: line)
    time.sleep(_POLL)


class Chief:
    """The chief's side: Ray's head, and messages to the other tasks.

    Args:
      address: the chief's address in TF_CONFIG.
      tasks: names of the other tasks, such as "worker 0".

    Attributes:
      address: the address of Ray's head.
    """

    def __init__(self, address: str, tasks: Sequence[str]):
        host, port = split_address(address)
        self._tasks = list(tasks)
        self._unknown: list[Connection] = []  # oldest first
        self._welcomed: list[Connection] = []
        self._is_closed = threading.Event()
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ClusterError(f"The chief cannot listen on its address {address!r} of TF_CONFIG: {error}.") from None
        with socket.create_server((host, 0)) as free:
            ray_port = free.getsockname()[1]
        self.address = f"{host}:{ray_port}"
        self._listener.setblocking(False)
        self._node = _start_node("--head", f"--node-ip-address={host}", f"--port={ray_port}",
                                 "--include-dashboard=false", "--num-cpus=0")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._welcoming = threading.Thread(target=self._welcome, name="trainer chief", daemon=True)
        self._welcoming.start()

    def wait_for_nodes(self, resources: Any) -> None:
        """Waits until the nodes of all tasks have joined.

        Args:
          resources: returns the resources of the cluster by name, as `ray.cluster_resources` does.

        Raises:
          ClusterTimeout: if nodes are missing after the timeout. It names them.
        """
        wait = _patience()
        while missing := [task for task in self._tasks if resource_of(task) not in resources()]:
            names = ", ".join(missing)
            _pause(wait, f"The chief waits for {names}.",
                   f"{names} did not come within {_PATIENCE:g} s. Start the same script with the TF_CONFIG of that "
                   f"task, and see whether its machine reaches {self.address}.")

    def close(self, code: int) -> None:
        """Sends the exit code to all tasks, and ends Ray's head."""
        self._is_closed.set()
        self._welcoming.join()
        for connection in self._welcomed:
            connection.send({"exit": code})
        for connection in [*self._unknown, *self._welcomed]:
            connection.close()
        self._selector.close()
        self._listener.close()
        _end_node(self._node)

    def _welcome(self) -> None:
        while not self._is_closed.is_set():
            for source in ready(self._selector, _POLL):
                if isinstance(source, Connection):
                    self._read(source)
                elif (sock := accepted(self._listener, self._make_room)) is not None:
                    self._unknown.append(Connection(sock, self._selector))
            old = [each for each in self._unknown if time.monotonic() - each.since > _HELLO_SECS]
            for connection in old or self._unknown[:-_MAX_UNKNOWN]:
                self._drop(connection)

    def _read(self, connection: Connection) -> None:
        if connection.ended:  # dropped on behalf of another
            return
        try:
            for message in connection.receive():
                if connection in self._unknown and message.get("task") in self._tasks:
                    self._unknown.remove(connection)
                    self._welcomed.append(connection)
                    connection.send({"ray": self.address})
                else:
                    raise NotOurs("It sent a message that has no meaning here.")
        except NotOurs:
            connection.ended = True
        if connection.ended:
            self._drop(connection)

    def _make_room(self) -> bool:
        """Drops the older half of the connections that have said nothing; returns whether there are any."""
        old = self._unknown[:len(self._unknown) // 2 + 1]
        for connection in old:
            self._drop(connection)
        return bool(old)

    def _drop(self, connection: Connection) -> None:
        is_unknown = connection in self._unknown
        for connections in (self._unknown, self._welcomed):
            if connection in connections:
                connections.remove(connection)
        connection.close(abort=is_unknown)


def serve(chief: str, name: str) -> int:
    """Makes this machine the node of a task until the chief ends.

    Args:
      chief: the chief's address in TF_CONFIG.
      name: name of the task, such as "worker 0".

    Returns:
      The exit code of the chief; 75 if it is lost.

    Raises:
      ClusterTimeout: if the chief cannot be reached in time.
    """
    connection, welcome = _welcomed(chief, name)
    with connection:
        own_host = connection.getsockname()[0]
        node = _start_node(f"--address={welcome['ray']}", f"--node-ip-address={own_host}",
                           "--resources=" + json.dumps({resource_of(name): 1}))
        try:
            told = _message(connection, while_true=lambda: node.poll() is None)
            if told is None and node.poll() is not None:
                LOGGER.error("%s ends: Ray has ended on this machine, or could not be started. See above.", name)
        finally:
            _end_node(node)
    return EXIT_CODE if told is None else int(told["exit"])


def _welcomed(chief: str, name: str) -> tuple[socket.socket, dict[str, Any]]:
    """Returns a connection to the chief, and its first message."""
    wait = _patience()
    while True:
        try:
            connection = connect(chief, 5.0)
        except OSError as error:
            why = why_unreachable(error, chief)
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may vanish silently
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"task": name}).encode() + b"\n")
            told = _message(connection, while_true=lambda: wait.remaining_secs > 0)
            if told is not None:
                return connection, told
            connection.close()  # by a chief that has just ended, or that many others have asked
            why = "it has closed the connection"
        _pause(wait, f"{name} waits for the chief at {chief}.",
               f"{name} has not reached the chief at {chief} within {_PATIENCE:g} s: {why}. Start the same script with "
               "the chief's TF_CONFIG there.")


def _message(connection: socket.socket, while_true: Callable[[], bool] = lambda: True) -> dict[str, Any] | None:
    """Returns the chief's next message; None if the chief is gone, or when `while_true` returns False."""
    while not select.select([connection], [], [], _POLL)[0]:
        if not while_true():
            return None
    try:
        with connection.makefile("rb", buffering=0) as lines:  # a buffer would take the next message, too
            line = lines.readline()
    except OSError:
        return None
    return json.loads(line) if line.endswith(b"\n") else None
