"""Connections between process 0 and each other process, whose end shows at once that a process has ended.

Owns these connections and what is said over them: who a process is, and why it leaves if it does so on purpose. They
are idle otherwise. A process that is suspended or cut off is not noticed here: its connection stays open.

Process 0 listens on a port that the system picks, on loopback alone if the job's address is a loopback address, until
all others have come. They find the port in JAX's key-value store, with a random word. A connection that does not say
it, or not in time, is dropped. Where a firewall is in between, everything goes on without these connections.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TextIO

from trainer.cluster.description.cluster_description import is_loopback
from trainer.cluster.liveness.key_value_store import Store
from trainer.cluster.liveness.listen import bind_all, close_all, overdue
from trainer.core.received_text import received

_KEYS = "trainer/peers/"
_CONNECT_SECS = 5.0  # for one attempt, and for one answer
_TRIES, _PAUSE_SECS = 20, 0.25
_GRACE_SECS = 0.2  # Ctrl-C ends all processes, but not at the same moment
_MAX_CHARACTERS = 2**13  # of a message
_MAX_REASON = 2**10  # characters, of which JSON makes up to six


class _Unknown(NamedTuple):
    """A connection that has not said whose it is, see `overdue`."""

    sock: socket.socket
    host: str
    since: float


class PeerConnections:
    """Notices the end of another process of the job: process 0 that of all others, and each of these that of process 0.

    Args:
      host: of process 0, as the others reach it.
      store: what all processes share.
      process: the number of this process.
      num_processes: how many there are.
      on_end: is called in a thread with the number of a process that has ended, and why it left; "" if it did not say.
        It is not called for a process that left in peace.
    """

    def __init__(self, host: str, store: Store, process: int, num_processes: int, on_end: Callable[[int, str], None]):
        self._host = host
        self._store = store
        self._process = process
        self._awaited = set(range(1, num_processes))
        self._on_end = on_end
        self._sockets: list[socket.socket] = []  # to others that are known
        self._unknown: dict[socket.socket, _Unknown] = {}  # the oldest first; who takes one out decides what it becomes
        self._is_leaving = False
        _start(self._serve if process == 0 else self._find)

    def leave(self, reason: str = "") -> None:
        """Ends all connections; the others receive the reason, or that there is none and all is well."""
        self._is_leaving = True
        self.say_goodbye(reason)
        for sock in tuple(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def say_goodbye(self, reason: str = "") -> None:
        """Tells the others as `leave` does, but goes on to listen to them."""
        for sock in tuple(self._sockets):
            with contextlib.suppress(OSError):  # the other one may have ended too
                sock.sendall(_line({"leaves": reason[:_MAX_REASON]}))

    def _serve(self) -> None:
        try:
            listener, *others = bind_all(self._host if is_loopback(self._host) else "", 0)
        except OSError:
            return
        close_all(others)  # "localhost" may be two addresses, and each has a port of its own
        word = secrets.token_hex(16)
        with listener, contextlib.suppress(Exception):  # of the store, as JAX raises it
            self._store.key_value_set(f"{_KEYS}0", json.dumps([listener.getsockname()[1], word]), allow_overwrite=True)
            listener.settimeout(_PAUSE_SECS)
            while self._awaited and not self._is_leaving:
                with contextlib.suppress(OSError):
                    sock, address = listener.accept()
                    self._unknown[sock] = _Unknown(sock, address[0], time.monotonic())
                    _start(self._meet, sock, word)
                self._drop(overdue(tuple(self._unknown.values()), time.monotonic()))
        self._drop(tuple(self._unknown.values()))

    def _drop(self, unknown: Iterable[_Unknown]) -> None:
        """Ends connections, and so the threads that read them."""
        for connection in unknown:
            if self._unknown.pop(connection.sock, None) is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _meet(self, sock: socket.socket, word: str) -> None:
        with contextlib.suppress(OSError), sock, _reader(sock) as lines:
            hello = _next_message(lines)
            is_dropped = self._unknown.pop(sock, None) is None
            if not is_dropped and hello.get("word") == word and hello.get("process") in self._awaited:
                sock.sendall(_line({"word": word}))
                self._awaited.discard(hello["process"])
                self._hear(sock, lines, hello["process"])

    def _find(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(Exception):  # of the store too, which JAX raises
                for _, value in self._store.key_value_dir_get(_KEYS):
                    port, word = json.loads(value)
                    with socket.create_connection((self._host, port), _CONNECT_SECS) as sock, _reader(sock) as lines:
                        sock.sendall(_line({"word": word, "process": self._process}))
                        if _next_message(lines).get("word") == word:
                            return self._hear(sock, lines, 0)
            time.sleep(_PAUSE_SECS)
            if self._is_leaving:
                return

    def _hear(self, sock: socket.socket, lines: TextIO, process: int) -> None:
        sock.settimeout(None)
        self._sockets.append(sock)
        # An error, unlike an end, may come from a firewall between the two: nothing follows from it.
        reason = _next_message(lines).get("leaves")
        in_peace = reason == ""
        if in_peace:  # it ends soon; or has a reason by then
            reason = _next_message(lines).get("leaves")
        if reason is None:
            time.sleep(_GRACE_SECS)
        if (reason or not in_peace) and not self._is_leaving:
            self._on_end(process, str(reason or ""))


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="trainer_peer_connections", daemon=True).start()


def _reader(sock: socket.socket) -> TextIO:
    return sock.makefile("r", encoding="utf-8", errors="replace")


def _line(message: dict[str, Any]) -> bytes:
    return f"{json.dumps(message)}\n".encode()


def _next_message(lines: TextIO) -> dict[str, Any]:
    """Returns what comes next; nothing if the connection has ended, or another program speaks."""
    try:
        message = received(lines.readline(_MAX_CHARACTERS))
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
