"""Process 0's side of the meeting before JAX starts: it listens, compares, and sends the outcome to all.

All processes receive "go" when all are present and equal. From then on the watchdogs detect the end of a process.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from trainer.core.errors import see
from trainer.distribute.cluster.description.cluster_description import (
    ClusterDescription,
    ClusterError,
    ClusterTimeout,
    is_loopback,
)
from trainer.distribute.cluster.rendezvous.connection import MAX_TEXT, Connection, NotOurs, ready
from trainer.distribute.cluster.rendezvous.gloo_addresses import Place, why_not_connected
from trainer.distribute.cluster.rendezvous.hello import MAX_SHOWN, Hello, first_of
from trainer.distribute.cluster.rendezvous.listen import accepted, close_all, listen
from trainer.distribute.cluster.rendezvous.star import Star
from trainer.distribute.cluster.rendezvous.wait import Wait

GRACE_SECS = 1.0  # from the first difference to the error, so that processes that come at the same time get it too
STATUS_SECS = 1.0  # from one sign of life to the next
HELLO_SECS = 10.0  # a connection that has not identified itself by then is dropped
MAX_UNKNOWN = 64  # of one host at a time; the oldest are dropped, as a process of the job identifies itself at once


def gather(
    hello: Hello, cluster: ClusterDescription, wait: Wait, listeners: Sequence[socket.socket] = ()
) -> Star:
    """Returns connections to the other processes after all have sent the same as `hello` and received the outcome.

    Args:
      hello: description of this process.
      cluster: all processes.
      wait: deadline.
      listeners: sockets that listen for the others; by default, on the port of this process's address.

    Raises:
      ClusterError: if processes differ or share a number, or if the port is not available.
      ClusterTimeout: if processes are missing at the deadline.
    """
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listeners = listeners or listen(cluster)
        stack.callback(close_all, listeners)
        gathering = _Gathering(hello, cluster, wait, selector, listeners)
        stack.callback(gathering.close)
        star = gathering.run()
        stack.pop_all()
        return star


class _Peer(Connection):
    """A connection, and the process at its other end."""

    def __init__(self, sock: socket.socket, host: str, selector: selectors.BaseSelector):
        super().__init__(sock, selector)
        self.host = host.removeprefix("::ffff:")
        self.is_local = is_loopback(self.host) or host == sock.getsockname()[0]  # on the machine of this process
        self.hello: Hello | None = None
        self.is_refused = False  # being of another job


def _overdue(unknown: Iterable[_Peer], now: float) -> list[_Peer]:
    """Returns the unidentified connections to drop, given oldest first."""
    of_host: dict[str, list[_Peer]] = defaultdict(list)
    for peer in unknown:
        of_host[peer.host].append(peer)
    return [peer for peers in of_host.values() for place, peer in enumerate(peers)
            if now - peer.since > HELLO_SECS or place < len(peers) - MAX_UNKNOWN]


class _Gathering:
    def __init__(self, hello: Hello, cluster: ClusterDescription, wait: Wait, selector: selectors.BaseSelector,
                 listeners: Sequence[socket.socket]):
        self._hello = hello
        self._cluster = cluster
        self._wait = wait
        self._selector = selector
        self._listeners = listeners
        self._peers: list[_Peer] = []
        self._members: dict[int, _Peer] = {}  # processes that agree with `hello`, by number
        self._left: dict[int, float] = {}  # when a member left that has not come back
        self._problems: list[str] = []
        self._refused: dict[tuple[int, str], str] = {}  # by number and job: processes of other jobs, and their texts
        self._fail_at = 0.0
        self._strangers = 0
        self._next_status = time.monotonic() + STATUS_SECS
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)

    def run(self) -> Star:
        """Returns connections to the others after all agree; no other connection remains open."""
        while self._problems or self._missing():
            now = time.monotonic()
            if self._problems and (now >= self._fail_at or self._wait.remaining_secs <= 0 or self._all_named()):
                self._fail(ClusterError(self._refusal()))
            if self._wait.remaining_secs <= 0:
                self._fail(ClusterTimeout(f"After {self._wait.timeout_secs:g} s, {self._absence()}"))
            if now >= self._next_status:
                self._next_status = now + STATUS_SECS
                for peer in self._named():
                    self._send_status(peer)
            self._drop_unknown(now)
            self._wait.say_if_due(self._line)
            self._step(self._wait.poll_secs)
        self._stop_listening()
        unconnected = why_not_connected(self._places())
        for peer in list(self._peers):
            if peer in self._members.values():
                peer.send({"kind": "go", "unconnected": unconnected})
            else:
                self._drop(peer, abort=True)
        return Star(self._selector, self._members, self._cluster, unconnected)

    def close(self) -> None:
        for peer in list(self._peers):
            peer.close(abort=True)

    def _step(self, timeout_secs: float) -> None:
        for source in ready(self._selector, timeout_secs):
            if isinstance(source, _Peer):
                self._read(source)
                continue
            sock = accepted(source, self._make_room)
            if sock is not None:
                with contextlib.suppress(OSError):  # it left already
                    self._peers.append(_Peer(sock, sock.getpeername()[0], self._selector))

    def _read(self, peer: _Peer) -> None:
        if peer not in self._peers:  # dropped on behalf of another one
            return
        try:
            for message in peer.receive():
                self._take(peer, message)
        except NotOurs:
            self._strangers += 1
            self._drop(peer, abort=True)
            return
        if peer.ended:
            self._drop(peer)

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.is_refused:
            return  # its messages do not matter
        if peer.hello is None:
            peer.hello = Hello.from_message(message)
            self._admit(peer, peer.hello)
        elif message.get("kind") == "gave_up":
            self._fail(ClusterTimeout(f"{peer.hello.described(self._cluster)}, gave up after its own timeout: "
                                      f"{self._absence()}"))
        else:
            raise NotOurs("It sent a message that has no meaning here.")

    def _admit(self, peer: _Peer, hello: Hello) -> None:
        """Adds a process to the members, or records the reason against it."""
        number, who = hello.process_id, hello.described(self._cluster)
        differences = hello.differences(self._hello, self._cluster.name(0))
        if "" != hello.job_id != self._hello.job_id != "":  # without an id, other addresses are most likely a mistake
            self._refuse(peer, hello, f"{who}: {'; '.join(differences)}.")
            return
        if differences:
            self._note_problem(f"{who}: {'; '.join(differences)}.")
            return
        if not 1 <= number < self._cluster.num_processes:
            self._note_problem(f"{who}: its number is not from 1 to {self._cluster.num_processes - 1}.")
            return
        if number in self._members:
            self._read(self._members[number])  # its end may be waiting to be read
        former = self._members.get(number)
        if former is not None:
            if former.hello is not None and former.hello.nonce != hello.nonce:
                self._note_problem(f"Two processes are {self._cluster.member(number)}: {former.hello.process} and "
                                   f"{hello.process}. Give each an index of its own.")
                return
            self._drop(former)
        self._members[number] = peer
        self._left.pop(number, None)
        self._send_status(peer)

    def _refuse(self, peer: _Peer, hello: Hello, text: str) -> None:
        """Refuses a process of another job, such as a leftover of an earlier run."""
        peer.is_refused = True
        advice = ("If it belongs to this job, give it the same job id (TRAINER_JOB_ID) and the same "
                  f"{self._cluster.source}.")
        peer.send({"kind": "failed", "error": "cluster", "lines": [
            f"{self._cluster.member(0)} has refused this process, which is of another job than it. {text} {advice}"]})
        key = hello.process_id, hello.job_id
        if key not in self._refused and len(self._refused) < MAX_SHOWN:
            self._refused[key] = text
            self._wait.say(f"Warning: {self._cluster.name(0)} has refused a process of another job, and goes on "
                           f"without it. {text} {advice}")

    def _note_problem(self, text: str) -> None:
        if not self._problems:
            self._fail_at = time.monotonic() + GRACE_SECS
        self._problems.append(text)

    def _drop(self, peer: _Peer, abort: bool = False) -> None:
        peer.close(abort)
        self._peers.remove(peer)
        if peer.hello is not None and self._members.get(peer.hello.process_id) is peer:
            del self._members[peer.hello.process_id]
            self._left[peer.hello.process_id] = time.monotonic()

    def _drop_unknown(self, now: float) -> None:
        for peer in _overdue([peer for peer in self._peers if peer.hello is None or peer.is_refused], now):
            self._strangers += not peer.is_refused
            self._drop(peer, abort=True)

    def _make_room(self) -> bool:
        """Drops the older half of the unidentified connections; returns whether there are any."""
        unknown = [peer for peer in self._peers if peer.hello is None]
        for peer in unknown[:len(unknown) // 2 + 1]:
            self._strangers += 1
            self._drop(peer, abort=True)
        return bool(unknown)

    def _named(self) -> list[_Peer]:
        return [peer for peer in self._peers if peer.hello is not None and not peer.is_refused]

    def _all_named(self) -> bool:
        numbers = {peer.hello.process_id for peer in self._named() if peer.hello is not None}
        return numbers.issuperset(range(1, self._cluster.num_processes))

    def _places(self) -> list[Place]:
        own = "this machine"
        places = [Place(self._hello.described(self._cluster), own, self._hello.gloo_address)]
        for _, peer in sorted(self._members.items()):
            assert peer.hello is not None, "it is a member by that"
            machine = own if peer.is_local else peer.host
            places.append(Place(peer.hello.described(self._cluster), machine, peer.hello.gloo_address))
        return places

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._cluster.num_processes) if number not in self._members]

    def _send_status(self, peer: _Peer) -> None:
        if not peer.has_unsent:
            peer.send({"kind": "waiting", "for": self._names(self._missing())})

    def _names(self, numbers: list[int]) -> str:
        return ", ".join(first_of([self._cluster.member(number) for number in numbers])) or "none"

    def _line(self) -> str:
        here = self._names(sorted(self._members))
        ignored = f" Connections of others, ignored: {self._strangers}." if self._strangers else ""
        return (f"{self._cluster.name(0)} awaits {self._names(self._missing())}. "
                f"Connected: {here}.{ignored}")

    def _absence(self) -> str:
        """Returns the missing processes, the time of their absence, and its likely cause."""
        missing, now = self._missing(), time.monotonic()
        left = first_of([f"{self._cluster.name(number)} had connected, but left {now - self._left[number]:.1f} s ago"
                         for number in missing if number in self._left])
        parts = [f"{len(missing)} of {self._cluster.num_processes} processes are missing: {self._names(missing)}.",
                 f"Connected: {self._names(sorted(self._members))}."]
        if left:
            parts.append(f"{'; '.join(left)}.")
        if self._refused:
            parts.append(f"These came, but are of another job: {' '.join(self._refused.values())}")
        if self._strangers:
            parts.append(f"{self._strangers} connections of others, or of another version of trainer, were ignored.")
        parts.append("Likely cause: it was not started, has ended (see its own output), has another address for "
                     f"{self._cluster.name(0)} in its {self._cluster.source}, or cannot reach "
                     f"{self._cluster.coordinator_address} (firewall, other network). {see('processes-missing')}")
        return " ".join(parts)

    def _refusal(self) -> str:
        return "\n".join(["The processes of this cluster were started differently, so none starts to train:",
                          *(f"- {line}" for line in first_of(self._problems)),
                          "Start all with the same program and package versions, as tasks of one cluster in their "
                          f"{self._cluster.source}."])

    def _fail(self, error: ClusterError | ClusterTimeout) -> NoReturn:
        """Raises an error here, and in all identified processes."""
        self._stop_listening()
        told = self._named()
        for peer in list(self._peers):
            if peer in told:
                peer.send({"kind": "failed", "error": "timeout" if isinstance(error, ClusterTimeout) else "cluster",
                           "lines": str(error)[:MAX_TEXT].split("\n")})
            else:
                self._drop(peer, abort=True)
        Star(self._selector, dict(enumerate(told)), self._cluster).close()
        raise error

    def _stop_listening(self) -> None:
        # Before the outcome is sent: JAX's first connection must find its own coordinator or nothing.
        for listener in self._listeners:
            with contextlib.suppress(KeyError):
                self._selector.unregister(listener)
            listener.close()
