"""Clusters on loopback for tests: members that meet in threads, processes that speak their protocol, and stars."""

import concurrent.futures
import contextlib
import dataclasses
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.waiting import GUARD_SECS, LONG_SECS, until
from trainer.distribute.cluster.description.cluster_description import ClusterDescription
from trainer.distribute.cluster.description.package_versions import package_versions
from trainer.distribute.cluster.rendezvous import gather, join, rendezvous, star
from trainer.distribute.cluster.rendezvous.connection import Connection, encode
from trainer.distribute.cluster.rendezvous.hello import Hello
from trainer.distribute.cluster.rendezvous.rendezvous import agree
from trainer.distribute.cluster.rendezvous.star import Star
from trainer.distribute.cluster.rendezvous.wait import Wait

SHORT_SECS = 0.4


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def is_free(port: int) -> bool:
    """Returns whether a port can be bound by a program that takes no care to share it."""
    with socket.socket() as sock:
        with contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return True
        return False


def cluster_of(size: int) -> list[ClusterDescription]:
    """Returns the description of a cluster on loopback for each member. Only the first port is used."""
    addresses = (f"127.0.0.1:{free_port()}", *(f"127.0.0.1:{index}" for index in range(1, size)))
    names = tuple(f"worker {index}" for index in range(size))
    return [ClusterDescription(addresses, index, "worker", names) for index in range(size)]


def port_of(cluster) -> int:
    return int(cluster[0].coordinator_address.rpartition(":")[2])


@dataclasses.dataclass
class Member:
    """One call of `agree`, in a thread of its own."""

    future: concurrent.futures.Future
    lines: list[str]

    def error(self) -> BaseException | None:
        return self.future.exception(timeout=GUARD_SECS)

    def unconnected(self) -> str:
        """Returns why CPU devices cannot reach each other, after a meeting without an error."""
        return self.future.result(timeout=GUARD_SECS)


@contextlib.contextmanager
def members_in_threads(monkeypatch) -> Iterator[Callable[..., Member]]:
    """Yields a function that starts a member; waits for all of them in the end."""
    monkeypatch.setattr(gather, "GRACE_SECS", 0.3)
    monkeypatch.setattr(gather, "HELLO_SECS", LONG_SECS)
    monkeypatch.setattr(star, "DRAIN_SECS", 0.3)
    monkeypatch.setattr(join, "LAST_WORDS_SECS", 0.3)
    here = threading.local()  # each thread stands for a process, with packages of its own
    is_over = threading.Event()

    class UntilTheEnd(Wait):
        """A deadline that has passed when the test has ended, so that a failed test leaves nobody waiting."""

        @property
        def remaining_secs(self):
            return -1.0 if is_over.is_set() else super().remaining_secs

    monkeypatch.setattr(rendezvous, "package_versions", lambda: here.versions)
    monkeypatch.setattr(rendezvous, "Wait", UntilTheEnd)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        def start(description, versions=None, timeout_secs=LONG_SECS, job_id="job", say_every_secs=LONG_SECS):
            lines = []

            def run():
                here.versions = versions or package_versions()
                met = agree(description, timeout_secs, lines.append, job_id, say_every_secs=say_every_secs)
                met.close()
                return met.unconnected

            return Member(pool.submit(run), lines)

        try:
            yield start
        finally:
            is_over.set()


def stars_of(size: int) -> list[Star]:
    """Returns each member's connections after the meeting: between the first member and each other member."""
    cluster = cluster_of(size)
    poll = [selectors.DefaultSelector() for _ in range(size)]
    pairs = {number: socket.socketpair() for number in range(1, size)}
    first = Star(poll[0], {number: Connection(pair[0], poll[0]) for number, pair in pairs.items()}, cluster[0])
    return [first, *(Star(poll[number], {0: Connection(pair[1], poll[number])}, cluster[number])
                     for number, pair in pairs.items())]


def connect(cluster) -> socket.socket:
    """Returns a socket that is connected to process 0, as soon as that listens."""
    connected = []

    def is_connected():
        with contextlib.suppress(ConnectionRefusedError):
            connected.append(socket.create_connection(("127.0.0.1", port_of(cluster)), timeout=GUARD_SECS))
        return connected

    until(is_connected)
    return connected[0]


def is_closed(sock) -> bool:
    """Returns whether the other end has closed the connection; reads the pending bytes."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def hello_of(description, **changes) -> bytes:
    """Returns the first message of a member, with some fields changed."""
    hello = Hello(description.addresses, description.process_id, "job", package_versions(), "pid 1 on host", "nonce",
                  "127.0.0.1")
    return encode({**hello.to_message(), **changes})
