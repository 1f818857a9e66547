"""Messages between processes: JSON objects, each on a line, over TCP.

Owns the form of messages, and must not know their meaning. Anybody may connect to an open port, so messages are checked
before use, and their texts are made printable.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from typing import Any

from trainer.core.received_text import received

MAX_BYTES = 2**20  # of one message
MAX_TEXT = 4000  # characters of a text that is shown
_DEAD_PEER_SECS = 10.0
_RECEIVE_BYTES = 2**16


class NotOurs(Exception):
    """The other end of a connection does not speak this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """Returns the bytes of a message."""
    return f"{json.dumps(message)}\n".encode()


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text of at most about `limit` characters.

    Example:
      >>> shortened("worker", 4)
      'work...'
    """
    return text if len(text) <= limit else text[:limit] + "..."


def close_at_once(sock: socket.socket) -> None:
    """Closes a socket and frees its port at once; the other end may lose unread data."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def ready(selector: selectors.BaseSelector, timeout_secs: float) -> list[Any]:
    """Waits for data; returns the connections, and the other sockets, that have data."""
    found = []
    for key, _ in selector.select(max(0.0, timeout_secs)):
        if key.data is not None:
            key.data.flush()
        found.append(key.data or key.fileobj)
    return found


class Connection:
    """A non-blocking end of a TCP connection.

    Args:
      sock: connected socket.
      selector: selector that the connection registers with.

    Attributes:
      since: start time, by `time.monotonic`.
      ended: whether no more data arrive.
      is_cut: whether the network has ended it, not the process at the other end.
    """

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector):
        sock.setblocking(False)
        self._sock, self._selector = sock, selector
        self._inbox, self._outbox = bytearray(), bytearray()
        self.since = time.monotonic()
        self.ended = self.is_cut = False
        self.set_patience(_DEAD_PEER_SECS)
        selector.register(sock, selectors.EVENT_READ, self)

    def set_patience(self, secs: float) -> None:
        """Sets the seconds after which unacknowledged data end the connection."""
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * secs))

    @property
    def has_unsent(self) -> bool:
        """Whether sent data have not been accepted by the other end yet."""
        return bool(self._outbox)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message now, or as soon as the other end accepts it."""
        self._outbox += encode(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much as the other end accepts. A broken connection is noticed on the next read."""
        if self.ended:
            return
        try:
            while self._outbox:
                del self._outbox[:self._sock.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._outbox.clear()
            self._note(error)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if self._selector.get_key(self._sock).events != events:
            self._selector.modify(self._sock, events, self)

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived completely. Marks a closed connection as ended.

        Raises:
          NotOurs: if other data than messages arrive.
        """
        try:
            arrived = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            arrived = b""
            self._note(error)
        self.ended = self.ended or not arrived
        self._inbox += arrived
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = rest
        if rest and (rest[:1] != b"{" or len(rest) > MAX_BYTES):
            raise NotOurs("It sends no object, or one that is too long.")
        return [_decoded(line) for line in lines]

    def _note(self, error: OSError) -> None:
        """Records a network error; a reset comes from a process that ends before it has read everything."""
        self.is_cut = self.is_cut or not isinstance(error, ConnectionError)

    def close(self, abort: bool = False) -> None:
        """Closes the connection. Can be called again.

        Args:
          abort: whether to close at once, see `close_at_once`.
        """
        self.ended = True
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._sock)
        if abort:
            close_at_once(self._sock)
        self._sock.close()


def _decoded(line: bytearray) -> dict[str, Any]:
    try:
        message = received(bytes(line))
    except (ValueError, RecursionError):
        raise NotOurs("It does not send JSON.") from None
    if not isinstance(message, dict):
        raise NotOurs("It does not send an object.")
    return message
