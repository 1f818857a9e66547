"""The connections of a meeting, which stay until the processes end: a star, with process 0 in the middle.

Owns the connections alone; their messages are the watchdog's, which reads them in one thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Container, Mapping
from typing import Any

from trainer.cluster.description.cluster_description import ClusterDescription
from trainer.cluster.rendezvous.connection import Connection, NotOurs, ready
from trainer.cluster.rendezvous.wait import POLL_SECS

DRAIN_SECS = 1.0  # for the others to read the last message, and to close first: who does keeps the port a while


class Star:
    """The connections of process 0 to all other processes, or of another process to process 0.

    Args:
      selector: where the connections are registered.
      connections: by the numbers of the processes at their other ends.
      cluster: all processes, and which of them this process is.
      unconnected: why the CPU devices of some processes cannot reach each other; "" if they can, as far as is known.

    Attributes:
      connections, cluster, unconnected: see above.
      process: the number of this process.
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
        """Waits until messages come, and returns them with who says them.

        None instead of a message says that a connection has ended. A message of this process itself is from `wake`.
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
        """Sends a message to all others; those that have not taken the message before get only the last one."""
        for connection in self.connections.values():
            if not connection.ended and (is_last or not connection.has_unsent):
                connection.send(message)

    def wake(self) -> None:
        """Lets `receive` return; for other threads."""
        with contextlib.suppress(OSError):  # it was called often, or the star is closed
            self._button.send(b"!")

    def drain(self, secs: float, but_for: Container[int] = ()) -> None:
        """Waits some time for the others to close their connections."""
        deadline = time.monotonic() + secs
        while time.monotonic() < deadline and not all(
                connection.ended for number, connection in self.connections.items() if number not in but_for):
            self.receive(POLL_SECS)

    def close(self) -> None:
        """Closes the connections; those of process 0 when the others have closed theirs, or some time after."""
        if self.process == 0:
            self.drain(DRAIN_SECS)
        for connection in self.connections.values():
            connection.close()
        self._selector.close()
        self._bell.close()
        self._button.close()
