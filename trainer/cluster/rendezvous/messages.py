"""What processes tell each other before JAX starts, and how it travels: short JSON messages over TCP.

Owns the wire format: a magic word, a length, JSON. Whatever arrives is checked before it is used, since anybody may
connect to an open port, and texts come out printable. Must not know who waits for whom.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
from typing import Any, NamedTuple

from trainer.cluster.description.cluster_description import ClusterDescription, is_ip
from trainer.core.received_text import received

MAGIC = b"TRAINER1"  # the last character is the protocol's version
MAX_BYTES = 2**20  # of one message
MAX_TEXT = 4000  # characters of a text that is shown
MAX_VALUE = 200  # characters of a single value that is shown
MAX_SHOWN = 8  # of many processes or differences
DEAD_PEER_MS = 10_000  # after which unanswered data ends a connection
RECEIVE_BYTES = 2**16
_LENGTH = struct.Struct(">I")


class NotOurs(Exception):
    """The other end of a connection does not speak this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """Returns a message as it travels."""
    body = json.dumps(message).encode()
    return MAGIC + _LENGTH.pack(len(body)) + body


def shortened(text: str, limit: int) -> str:
    """Returns a text of at most about `limit` characters.

    Example:
      >>> shortened("worker", 4)
      'work...'
    """
    return text if len(text) <= limit else text[:limit] + "..."


class Hello(NamedTuple):
    """What a process says of itself.

    Attributes:
      cluster: the addresses of all processes, as it knows them.
      process_id: its number among them.
      job_id: of the job that it belongs to; "" if nothing says which.
      versions: what must be the same everywhere, by name.
      process: where it runs, for messages.
      nonce: distinguishes two processes; the same when a process connects again.
      gloo_address: where its CPU devices would be reached, see `own_gloo_address`.
    """

    cluster: tuple[str, ...]
    process_id: int
    job_id: str
    versions: dict[str, str]
    process: str
    nonce: str
    gloo_address: str = ""

    def to_message(self) -> dict[str, Any]:
        """Returns it as a message."""
        return {"kind": "hello", **self._asdict()}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Hello:
        """Returns what a message says.

        Raises:
          NotOurs: if anything in it has another type than expected.
        """
        cluster, versions, process_id = (message.get(key) for key in ("cluster", "versions", "process_id"))
        texts = {key: message.get(key) for key in ("job_id", "process", "nonce", "gloo_address")}
        if not (message.get("kind") == "hello" and isinstance(cluster, list) and isinstance(versions, dict)
                and isinstance(process_id, int) and not isinstance(process_id, bool)
                and all(isinstance(text, str) for text in (*cluster, *versions.values(), *texts.values()))):
            raise NotOurs("It sent a message of another form.")
        if not is_ip(texts["gloo_address"] or "::"):
            raise NotOurs("It sent an address of another form.")
        return cls(cluster=tuple(cluster), versions=versions, process_id=process_id, **texts)  # type: ignore[arg-type]

    def differences(self, other: Hello, other_name: str) -> list[str]:
        """Returns in what this process differs from another, each as part of a sentence."""
        found = []
        if self.job_id != other.job_id:
            mine, theirs = _value(self.job_id or None), _value(other.job_id or None)
            found.append(f"its job id is {mine}, not {theirs} as on {other_name}")
        if len(self.cluster) != len(other.cluster):
            found.append(f"its cluster has {len(self.cluster)} processes, not {len(other.cluster)} as on {other_name}")
        else:
            found += [f"its cluster has {_value(mine)} as address {index}, not {_value(theirs)} as on {other_name}"
                      for index, (mine, theirs) in enumerate(zip(self.cluster, other.cluster, strict=True))
                      if mine != theirs]
        for name in sorted(self.versions.keys() | other.versions.keys()):
            mine, theirs = _value(self.versions.get(name)), _value(other.versions.get(name))
            if self.versions.get(name) != other.versions.get(name):
                found.append(f"its {shortened(name, MAX_VALUE)} is {mine}, not {theirs} as on {other_name}")
        more = len(found) - MAX_SHOWN
        return found if more <= 0 else [*found[:MAX_SHOWN], f"and {more} more"]

    def described(self, cluster: ClusterDescription) -> str:
        """Returns who says this, for messages."""
        known = 0 <= self.process_id < cluster.num_processes
        name = cluster.member(self.process_id) if known else f"process {self.process_id}"
        return f"{name}, {shortened(self.process, MAX_VALUE)}"


def _value(value: str | None) -> str:
    return "none" if value is None else f"'{shortened(value, MAX_VALUE)}'"


def close_at_once(sock: socket.socket) -> None:
    """Closes a socket so that its port is free at once; the other end may lose what it has not read."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Connection:
    """One end of a TCP connection, which never blocks.

    Args:
      sock: a connected socket.
      selector: where the connection registers what it waits for, with `data`.
    """

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, data: Any = None):
        sock.setblocking(False)
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
        self._sock = sock
        self._selector = selector
        self._inbox = bytearray()
        self._outbox = bytearray()
        self.ended = False
        selector.register(sock, selectors.EVENT_READ, data)

    @property
    def has_unsent(self) -> bool:
        """Whether the other end has not taken all that was sent."""
        return bool(self._outbox)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message now, or as soon as the other end takes it."""
        self._outbox += encode(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the other end takes. A connection that breaks is marked as ended."""
        if self.ended:
            return
        try:
            while self._outbox:
                del self._outbox[:self._sock.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
            return
        writing = selectors.EVENT_WRITE if self._outbox else 0
        key = self._selector.get_key(self._sock)
        if key.events != selectors.EVENT_READ | writing:
            self._selector.modify(self._sock, selectors.EVENT_READ | writing, key.data)

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived in full. A connection that was closed is marked as ended.

        Raises:
          NotOurs: if something else than messages arrives.
        """
        try:
            received = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        self.ended = self.ended or not received
        self._inbox += received
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    def _next_message(self) -> dict[str, Any] | None:
        if bytes(self._inbox[:len(MAGIC)]) != MAGIC[:len(self._inbox)]:
            raise NotOurs("It does not start with the magic word.")
        start = len(MAGIC) + _LENGTH.size
        if len(self._inbox) < start:
            return None
        size, = _LENGTH.unpack_from(self._inbox, len(MAGIC))
        if size > MAX_BYTES:
            raise NotOurs(f"It announces {size} bytes.")
        if len(self._inbox) < start + size:
            return None
        try:
            message = received(bytes(self._inbox[start:start + size]))
        except (ValueError, RecursionError):
            raise NotOurs("It does not send JSON.") from None
        if not isinstance(message, dict):
            raise NotOurs("It does not send an object.")
        del self._inbox[:start + size]
        return message

    def close(self, abort: bool = False) -> None:
        """Closes the connection. May be called again.

        Args:
          abort: close at once, see `close_at_once`.
        """
        self.ended = True
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._sock)
        if abort:
            close_at_once(self._sock)
        self._sock.close()
