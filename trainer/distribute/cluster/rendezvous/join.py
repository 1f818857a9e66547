"""The side of every other process in the meeting before JAX starts: it finds process 0 and waits for the outcome."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any

from trainer.distribute.cluster.description.cluster_description import (
    ClusterDescription,
    ClusterError,
    ClusterTimeout,
    split_address,
)
from trainer.distribute.cluster.rendezvous.connection import Connection, NotOurs, close_at_once, ready, shortened
from trainer.distribute.cluster.rendezvous.hello import Hello
from trainer.distribute.cluster.rendezvous.star import Star
from trainer.distribute.cluster.rendezvous.wait import POLL_SECS, Wait

CONNECT_SECS = 5.0  # for one attempt
FIRST_PAUSE_SECS = 0.05  # between attempts; doubled each time
MAX_PAUSE_SECS = 1.0
SILENCE_SECS = 10.0  # process 0 gives a sign of life each second
LAST_WORDS_SECS = 1.0  # for process 0 to say who is missing, when this process gives up


def join(hello: Hello, cluster: ClusterDescription, wait: Wait) -> Star:
    """Returns the connection to process 0 after it has confirmed that all processes are present and agree.

    Raises:
      ClusterError: if process 0 reports that processes differ.
      ClusterTimeout: if processes are missing at the deadline.
    """
    return _Joining(hello, cluster, wait).run()


class _Lost(Exception):
    """The connection to process 0 is no longer usable."""


class _Joining:
    def __init__(self, hello: Hello, cluster: ClusterDescription, wait: Wait):
        self._hello = hello
        self._cluster = cluster
        self._wait = wait
        self._me = cluster.name(hello.process_id)
        self._coordinator = cluster.member(0)
        self._reason = "no attempt has ended yet"  # why there is no agreement, as of now
        self._unconnected = ""

    def run(self) -> Star:
        pause = FIRST_PAUSE_SECS
        while self._wait.remaining_secs > 0:
            try:
                sock = connect(self._cluster.coordinator_address, min(CONNECT_SECS, self._wait.remaining_secs))
            except OSError as error:
                self._reason = why_unreachable(error, self._cluster.coordinator_address)
            else:
                with contextlib.ExitStack() as stack:
                    selector = stack.enter_context(selectors.DefaultSelector())
                    connection = Connection(sock, selector)
                    stack.callback(connection.close)
                    try:
                        self._converse(connection, selector)
                    except _Lost as lost:
                        self._reason = str(lost)
                    else:
                        stack.pop_all()
                        return Star(selector, {0: connection}, self._cluster, self._unconnected)
            self._sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECS)
        raise ClusterTimeout(self._gave_up())

    def _converse(self, connection: Connection, selector: selectors.BaseSelector) -> None:
        """Returns on "go"; raises `_Lost` if another attempt may help."""
        self._reason = "it accepts the connection but does not answer"
        connection.send(self._hello.to_message())
        last_heard = time.monotonic()
        while self._wait.remaining_secs > 0:
            self._wait.say_if_due(self._line)
            messages = self._receive(connection, selector, self._wait.poll_secs)
            for message in messages:
                if self._take(message):
                    return
            if messages:
                last_heard = time.monotonic()
            if connection.ended:
                raise _Lost("it closed the connection")
            if time.monotonic() - last_heard > SILENCE_SECS:
                raise _Lost(f"it has not answered for {SILENCE_SECS:g} s")
        connection.send({"kind": "gave_up"})
        deadline = time.monotonic() + LAST_WORDS_SECS
        while not connection.ended and time.monotonic() < deadline:
            for message in self._receive(connection, selector, POLL_SECS):
                if message.get("kind") == "failed":
                    self._take(message)
        raise ClusterTimeout(self._gave_up())

    def _receive(
        self, connection: Connection, selector: selectors.BaseSelector, timeout_secs: float
    ) -> list[dict[str, Any]]:
        try:
            return connection.receive() if ready(selector, timeout_secs) else []
        except NotOurs:
            raise _Lost("another program answers there, or another version of trainer") from None

    def _take(self, message: dict[str, Any]) -> bool:
        """Returns whether a message is the last."""
        kind = message.get("kind")
        if kind == "waiting":
            self._reason = f"it is there, and awaits {shortened(str(message.get('for')))}"
        elif kind == "failed":
            lines = message.get("lines")
            text = shortened("\n".join(map(str, lines)) if isinstance(lines, list) else "")
            raise ClusterTimeout(text) if message.get("error") == "timeout" else ClusterError(text)
        elif kind == "go":
            self._unconnected = shortened(str(message.get("unconnected", "")))
        return kind == "go"

    def _sleep(self, secs: float) -> None:
        end = time.monotonic() + secs
        while time.monotonic() < end and self._wait.remaining_secs > 0:
            self._wait.say_if_due(self._line)
            time.sleep(max(0.0, min(self._wait.poll_secs, end - time.monotonic())))

    def _line(self) -> str:
        return f"{self._me} awaits {self._coordinator}: {self._reason}."

    def _gave_up(self) -> str:
        return (f"{self._me} did not meet the other processes within {self._wait.timeout_secs:g} s. It awaited "
                f"{self._coordinator}: {self._reason}. Look at the output of the awaited processes: they may not have "
                f"been started, or have ended. Check the address of {self._cluster.name(0)} in this process's "
                f"{self._cluster.source}, and that no firewall closes the port.")


def connect(address: str, timeout_secs: float) -> socket.socket:
    """Returns a socket that is connected to an address.

    Raises:
      OSError: if the address cannot be reached in time.
    """
    sock = socket.create_connection(split_address(address), timeout_secs)
    # On one machine, a port without a listener can be given to the connecting socket itself, which then talks to itself
    # and keeps process 0 from listening.
    if sock.getsockname() == sock.getpeername():
        close_at_once(sock)
        raise ConnectionRefusedError("The socket was connected to itself.")
    return sock


def why_unreachable(error: OSError, address: str) -> str:
    """Returns the likely cause of a failed connection, as part of a sentence.

    Example:
      >>> why_unreachable(ConnectionRefusedError(), "10.0.0.1:2222")
      'connection refused, nothing listens on port 2222 yet'
    """
    host, port = split_address(address)
    if isinstance(error, socket.gaierror):
        return f"the host name {host!r} does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused, nothing listens on port {port} yet"
    if isinstance(error, TimeoutError):
        return "no answer at all, as with a wrong address or a firewall"
    return f"it cannot be reached ({error.strerror or type(error).__name__})"
