"""The connections of a meeting, kept until each process has its watchdog: nothing else notices an end before that.

JAX's start ends a process by SIGABRT that waits for a dead process, without a word about which process died.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any

from trainer.cluster.description.cluster_description import ClusterDescription
from trainer.cluster.description.process_names import process_name
from trainer.cluster.liveness.diagnosis import Observer, Report, Seen, lost
from trainer.cluster.liveness.process_end import FAILED, PEER_LOST
from trainer.cluster.rendezvous.messages import MAX_TEXT, Connection, NotOurs, shortened
from trainer.cluster.rendezvous.wait import POLL_SECS

ALIVE_SECS = 0.5  # from one sign of life to the next
DRAIN_SECS = 1.0  # for the others to read the last message, and to close first: who does keeps the port a while
LATER_SECS = 2.0  # than process 0, which knows whom all wait for
DIAGNOSIS_SECS = 1.0  # for the end of a connection to be noticed, and what follows
SILENCE = 0.75  # of the limit
_HAS_ENDED = "its process has ended, or given up, while JAX started"

End = Callable[[str, int, Callable[[], None]], None]


class StartupMonitor:
    """The other processes of a cluster, from their meeting on.

    Process 0 is connected with all others, and each of these with process 0. Close it, unless `watch` was called.

    Args:
      selector: that of the connections.
      connections: to other processes, by their numbers.
      cluster: all processes, and which of them this process is.
      unconnected: why the CPU devices of some processes cannot reach each other; "" if they can, as far as is known.

    Attributes:
      unconnected: see above.
    """

    def __init__(
        self, selector: selectors.BaseSelector, connections: Mapping[int, Connection], cluster: ClusterDescription,
        unconnected: str = "",
    ):
        self.unconnected = unconnected
        self._selector = selector
        self._connections = dict(connections)
        self._cluster = cluster
        self._heard = dict.fromkeys(connections, 0)  # how many messages
        self._awaited = set(connections)  # that have not said that they have started; of process 0, that all have
        self._has_started = False  # this process
        self._has_said_so = self._has_left = self._has_given_up = False
        self._thread: threading.Thread | None = None

    def watch(self, timeout_secs: float, end: End) -> None:
        """Looks after the others in a thread, until all have started.

        Args:
          timeout_secs: within which they have to.
          end: called in the thread when that becomes impossible, with the reason, the exit code, and what there is to
            wait for before this process ends.
        """
        self._thread = threading.Thread(
            target=self._watch, args=(timeout_secs, end), name="trainer_startup_monitor", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Says that this process has started, and is looked after by its watchdog."""
        self._has_started = True

    def await_others(self) -> None:
        """Waits until all have started, after `started`; `end` is called if that becomes impossible."""
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Lets the others know, by the end of their connection, that this process does not start."""
        self._has_left = True

    def give_up(self) -> None:
        """Lets the others know that this process does not start; when they have ended, `end` is called here too."""
        self._has_given_up = True

    def await_end(self) -> None:
        """Waits a little for `end` to be called, as JAX's start has failed, maybe as another process has ended."""
        if self._thread is not None:
            self._thread.join(DIAGNOSIS_SECS)

    def close(self) -> None:
        """Closes the connections; of process 0, when the others have closed theirs, or some time after."""
        if self._cluster.process_id == 0:
            self._drain()
        for connection in self._connections.values():
            connection.close()
        self._selector.close()

    def _watch(self, timeout_secs: float, end: End) -> None:
        is_first = self._cluster.process_id == 0
        observer, alive_at = Observer(ALIVE_SECS), 0.0
        while True:
            text = self._receive()
            now = time.monotonic()
            seen = observer.observe(now, {number: Report(count, 0, 0, "") for number, count in self._heard.items()})
            text = text or self._lateness(seen, timeout_secs)
            if self._has_left:
                self.close()
                return
            if self._has_given_up:
                self._outlast(end)
                return
            if text is not None:
                quiet = {number for number, said in seen.items() if said.silent_secs > 4 * ALIVE_SECS}
                if is_first:
                    self._tell({"kind": "lost", "text": text})
                end(text, PEER_LOST, functools.partial(self._drain, quiet) if is_first else lambda: None)
                return
            if now >= alive_at:
                alive_at = now + ALIVE_SECS
                self._tell({"kind": "alive"})
            if self._has_started and not is_first and not self._has_said_so:
                self._has_said_so = True
                self._tell({"kind": "started"})
            if self._has_started and not self._awaited:
                if is_first:
                    self._tell({"kind": "all_started"})
                self.close()
                return

    def _outlast(self, end: End) -> None:
        self._tell({"kind": "gave_up"})
        while not all(connection.ended for connection in self._connections.values()):
            self._messages()
        own = self._cluster.process_id
        assert own is not None, "it has met the others"
        end(f"{process_name(own)} has given up while JAX started, and the others have ended.",
            FAILED, lambda: None)

    def _receive(self) -> str | None:
        """Takes what the others say; returns why this process has to leave, if it has to."""
        for number, message in self._messages():
            self._heard[number] += 1
            if message.get("kind") == "lost":
                return shortened(str(message.get("text", "")), MAX_TEXT)
            if message.get("kind") in ("started", "all_started"):
                self._awaited.discard(number)
            if message.get("kind") == "gave_up":
                return lost(number, {}, _HAS_ENDED)
        ended = [number for number in sorted(self._awaited) if self._connections[number].ended]
        return lost(ended[0], {}, _HAS_ENDED) if ended else None

    def _messages(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns what has come meanwhile, with the numbers of those who say it; closes connections that have ended."""
        found: list[tuple[int, dict[str, Any]]] = []
        self._selector.select(POLL_SECS)
        for number, connection in self._connections.items():
            if not connection.ended:
                connection.flush()
                with contextlib.suppress(NotOurs):
                    found += [(number, message) for message in connection.receive()]
                if connection.ended:
                    connection.close()
        return found

    def _lateness(self, seen: Mapping[int, Seen], timeout_secs: float) -> str | None:
        """Returns why this process has to leave as others are silent, or take too long; None if they are not."""
        if not self._awaited:
            return None
        number = max(self._awaited, key=lambda number: seen[number].silent_secs)
        silent_secs, watched_secs = seen[number].silent_secs, seen[number].still_secs
        if silent_secs >= SILENCE * timeout_secs:
            return lost(number, {}, f"nothing was heard of it for {silent_secs:.1f} s, while JAX started")
        if self._cluster.process_id != 0:
            return None if watched_secs < timeout_secs + LATER_SECS else lost(
                0, {}, f"it has not said for {watched_secs:.1f} s that JAX has started in all workers")
        late = sorted(self._awaited | (set() if self._has_started else {0}))
        return None if watched_secs < timeout_secs else (
            f"JAX has not started within {timeout_secs:g} s in {', '.join(map(process_name, late))}.")

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _drain(self, quiet: Container[int] = ()) -> None:
        """Waits for the others to close, but for those of whom nothing is heard."""
        deadline = time.monotonic() + DRAIN_SECS
        awaited = [connection for number, connection in self._connections.items() if number not in quiet]
        while time.monotonic() < deadline and not all(connection.ended for connection in awaited):
            self._messages()
