"""PeerConnections tell at once that a process has ended, and nothing of one that left in peace."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.fake_store import FakeStore
from tests.support.rendezvous_cluster import is_closed, until
from trainer.cluster.liveness import listen, peer_connections
from trainer.cluster.liveness.peer_connections import PeerConnections

HOST = "localhost"
SOON_SECS = 30.0  # importing JAX takes long on a busy machine


class Process:
    """One end, and what it was told: pairs of a process and a reason."""

    def __init__(self, store, number, count):
        self.told = queue.Queue()
        self.peers = PeerConnections(HOST, store, number, count, lambda *end: self.told.put(end))

    def connections(self):
        return len(self.peers._sockets)


def wait_until(condition):
    until(condition, SOON_SECS)


@pytest.fixture
def job():
    """Three processes that are connected, and their store."""
    store = FakeStore()
    processes = [Process(store, number, 3) for number in range(3)]
    wait_until(lambda: [each.connections() for each in processes] == [2, 1, 1])
    yield processes, store
    for each in processes:
        each.peers.leave()


def end(process):
    """What the kernel does when it ends a process."""
    for sock in process.peers._sockets:
        sock.shutdown(socket.SHUT_RDWR)


def test_the_end_of_process_0_is_told_to_all_others(job):
    processes, _ = job
    processes[0].peers._is_leaving = True  # it is told nothing itself, being gone
    end(processes[0])
    assert [each.told.get(timeout=SOON_SECS) for each in processes[1:]] == [(0, ""), (0, "")]


def test_the_end_of_another_one_is_told_to_process_0_alone(job):
    processes, _ = job
    processes[2].peers._is_leaving = True
    end(processes[2])
    assert processes[0].told.get(timeout=SOON_SECS) == (2, "")
    assert processes[1].told.empty()


def test_who_leaves_for_a_reason_says_it_and_who_leaves_in_peace_is_not_missed(job):
    processes, _ = job
    processes[1].peers.leave()
    processes[2].peers.leave("worker 1 has stalled.")
    assert processes[0].told.get(timeout=SOON_SECS) == (2, "worker 1 has stalled.")
    processes[0].peers.leave()
    time.sleep(2 * peer_connections._GRACE_SECS)
    assert all(each.told.empty() for each in processes)


def test_a_reason_is_escaped(job):
    processes, _ = job
    processes[2].peers.leave("worker 2 has failed: \x1b[2J\r")
    assert processes[0].told.get(timeout=SOON_SECS) == (2, "worker 2 has failed: \\x1b[2J\\r")


def test_strangers_are_dropped_and_no_port_stays_open_once_all_have_come():
    store = FakeStore()
    chief = Process(store, 0, 2)
    wait_until(lambda: store.values)
    port, word = json.loads(store.values["trainer/peers/0"])
    for line in (b"GET / HTTP/1.1\r\n", b"\xff\xfe\n", b'{"word": "no", "process": 1}\n', b"[1]\n",
                 json.dumps({"word": word, "process": 2}).encode() + b"\n", b"x" * 10_000):
        with socket.create_connection((HOST, port), SOON_SECS) as sock:
            sock.sendall(line)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
    worker = Process(store, 1, 2)
    wait_until(lambda: chief.connections() == worker.connections() == 1)

    def is_closed():
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((HOST, port), SOON_SECS).close()
            return False
        return True

    wait_until(is_closed)
    assert chief.told.empty() and worker.told.empty()
    worker.peers.leave()


@pytest.fixture
def chief():
    """Process 0 of two, the other one of which has not come, and a function that connects to it."""
    store = FakeStore()
    process = Process(store, 0, 2)
    wait_until(lambda: store.values)
    port, _ = json.loads(store.values["trainer/peers/0"])
    with contextlib.ExitStack() as stack:
        yield process, store, lambda: stack.enter_context(socket.create_connection((HOST, port), SOON_SECS))
    process.peers.leave()


def test_a_host_that_opens_many_connections_gets_few_threads_and_keeps_nobody_out(chief):
    process, store, connect = chief
    silent = [connect() for _ in range(listen.MAX_UNKNOWN + 40)]
    wait_until(lambda: sum(map(is_closed, silent)) >= 40)
    assert [is_closed(sock) for sock in silent] == [True] * 40 + [False] * listen.MAX_UNKNOWN, "the oldest go first"
    worker = Process(store, 1, 2)
    wait_until(lambda: process.connections() == worker.connections() == 1)
    wait_until(lambda: all(map(is_closed, silent)))
    assert process.told.empty() and worker.told.empty()
    worker.peers.leave()


def test_who_does_not_come_to_the_end_of_its_first_message_is_dropped(chief, monkeypatch):
    monkeypatch.setattr(listen, "HELLO_SECS", 0.2)
    _, _, connect = chief
    sock, begin = connect(), time.monotonic()
    while not is_closed(sock):
        assert time.monotonic() - begin < SOON_SECS / 10, "each byte gives it more time"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b" ")
        time.sleep(0.02)


def test_a_process_that_finds_nobody_goes_on_without(monkeypatch):
    monkeypatch.setattr(peer_connections, "_PAUSE_SECS", 0.01)
    store = FakeStore()
    store.key_value_set("trainer/peers/0", json.dumps([1, "word"]))  # a port that nobody listens on
    alone = Process(store, 1, 2)
    time.sleep(0.5)
    assert alone.told.empty() and alone.connections() == 0
    alone.peers.leave()


@pytest.mark.slow
def test_a_killed_process_is_noticed_at_once():
    store = FakeStore()
    chief = Process(store, 0, 2)
    wait_until(lambda: store.values)
    program = f"""
import sys, time
sys.path[:] = {sys.path!r}
from trainer.cluster.liveness.peer_connections import PeerConnections
from tests.support.fake_store import FakeStore
store = FakeStore()
store.values = {store.values!r}
PeerConnections({HOST!r}, store, 1, 2, print)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: chief.connections() == 1 or process.poll() is not None)
        os.kill(process.pid, signal.SIGKILL)
        begin = time.monotonic()
        assert chief.told.get(timeout=SOON_SECS) == (1, "")
        assert time.monotonic() - begin < 1.0
    finally:
        process.kill()
        process.wait()
