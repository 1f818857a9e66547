"""Connections of a meeting, which remain until the processes end: a star, with process 0 in the center.

Owns the connections only; the watchdog owns their messages, and reads them in a thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Container, Mapping
from typing import Any

from trainer.distribute.cluster.description.cluster_description import ClusterDescription
from trainer.distribute.cluster.rendezvous.connection import Connection, NotOurs, ready
from trainer.distribute.cluster.rendezvous.wait import POLL_SECS

DRAIN_SECS = 1.0  # for the others to read the last message, and to close first: who does keeps the port a while


class Star:
    """Connections of process 0 to all other processes, or of another process to process 0.

    Args:
      selector: selector of the connections.
      connections: connections by the numbers of the other processes.
      cluster: all processes, and the number of this process.
      unconnected: reason why the CPU devices of some processes cannot reach each other; "" if none is known.

    Attributes:
      connections, cluster, unconnected: see above.
      process: number of this process.
    """

    def __init__(
        self, selector: selectors.BaseSelector, connections: Mapping[int, Connection], cluster: ClusterDescription,
        unconnected: str = "",
    ):
        assert cluster.process_id is not None, "it has met the others"
        self.connections, self.cluster, self.unconnected = dict(connections), cluster, unconnected
        self.process = cluster.process_id
        self._numbers = {connection: number for number, connection in connections.items()}
        self._selector = selector
        self._bell, self._button = socket.socketpair()
        for sock in (self._bell, self._button):
            sock.setblocking(False)
        selector.register(self._bell, selectors.EVENT_READ)

    def receive(self, timeout_secs: float) -> list[tuple[int, dict[str, Any] | None]]:
        """Waits for messages, and returns them with their senders.

        None instead of a message marks an ended connection. A message from this process itself comes from `wake`.
        """
        found: list[tuple[int, dict[str, Any] | None]] = []
        for source in ready(self._selector, timeout_secs):
            if source is self._bell:
                self._bell.recv(1024)
                found.append((self.process, {}))
                continue
            number = self._numbers[source]
            try:
                found += [(number, message) for message in source.receive()]
            except NotOurs:
                source.ended = True
            if source.ended:
                source.close()
                found.append((number, None))
        return found

    def tell(self, message: dict[str, Any], is_last: bool = False) -> None:
        """Sends a message to all others; processes that have not accepted the previous message get only the last."""
        for connection in self.connections.values():
            if not connection.ended and (is_last or not connection.has_unsent):
                connection.send(message)

    def wake(self) -> None:
        """Makes `receive` return; for other threads."""
        with contextlib.suppress(OSError):  # it was called often, or the star is closed
            self._button.send(b"!")

    def drain(self, secs: float, but_for: Container[int] = ()) -> None:
        """Waits a limited time for the others to close their connections."""
        deadline = time.monotonic() + secs
        while time.monotonic() < deadline and not all(
                connection.ended for number, connection in self.connections.items() if number not in but_for):
            self.receive(POLL_SECS)

    def close(self) -> None:
        """Closes the connections; process 0 first waits a limited time until the others have closed theirs."""
        if self.process == 0:
            self.drain(DRAIN_SECS)
        for connection in self.connections.values():
            connection.close()
        self._selector.close()
        self._bell.close()
        self._button.close()
