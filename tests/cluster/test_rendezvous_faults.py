"""What a meeting of processes survives: strangers, members that die, other programs, interrupts, restarts."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.support import project_files
from tests.support.rendezvous_cluster import (
    SHORT_SECS,
    cluster_of,
    connect,
    free_port,
    hello_of,
    is_closed,
    is_free,
    port_of,
)
from tests.support.waiting import GUARD_SECS, LONG_SECS, until
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterTimeout
from trainer.distribute.cluster.rendezvous import gather, join
from trainer.distribute.cluster.rendezvous.connection import MAX_BYTES, encode
from trainer.distribute.cluster.rendezvous.rendezvous import agree

ALWAYS = 1e-9  # so that a reason is said before another takes its place
STRANGERS = {
    "a web client": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a line without end": b"{" * (MAX_BYTES + 1),
    "not JSON": b"\xff{[}\n",
    "deeply nested": b'{"a":' + b"[" * 200_000 + b"\n",
    "a huge number": b'{"a":' + b"9" * 6000 + b"}\n",
    "not an object": b"[]\n",
    "no hello": encode({"kind": "go"}),
    "no address": encode({"kind": "hello", "cluster": [], "process_id": 1, "job_id": "", "versions": {}, "process": "",
                          "nonce": "", "gloo_address": "host"}),
    "wrong types": encode({"kind": "hello", "cluster": [1], "process_id": "1", "job_id": None, "versions": []}),
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped_and_disturbs_nobody(start, sent):
    cluster = cluster_of(2)
    first = start(cluster[0], say_every_secs=0.05)
    with connect(cluster) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    until(lambda: first.lines and "Connections of others, ignored: 1." in first.lines[-1])
    assert [start(cluster[1]).error(), first.error()] == [None, None]
    assert is_free(port_of(cluster))


def test_a_stranger_that_says_nothing_holds_nobody_up(start):
    cluster = cluster_of(2)
    first = start(cluster[0])
    with connect(cluster) as silent, connect(cluster) as half:
        half.sendall(b'{"ki')
        assert [start(cluster[1]).error(), first.error()] == [None, None]
        assert is_free(port_of(cluster))
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""


def test_a_stranger_that_says_nothing_is_dropped_after_a_while(start, monkeypatch):
    monkeypatch.setattr(gather, "HELLO_SECS", 0.1)
    cluster = cluster_of(2)
    first = start(cluster[0])
    with connect(cluster) as silent, contextlib.suppress(ConnectionResetError):
        assert silent.recv(1) == b""
    assert [start(cluster[1]).error(), first.error()] == [None, None]


def test_a_host_that_opens_many_connections_keeps_nobody_out(start):
    cluster = cluster_of(2)
    first = start(cluster[0])
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(cluster)) for _ in range(gather.MAX_UNKNOWN + 40)]
        until(lambda: sum(map(is_closed, silent)) >= 40)
        assert [is_closed(sock) for sock in silent] == [True] * 40 + [False] * gather.MAX_UNKNOWN, "the oldest go first"
        assert [start(cluster[1]).error(), first.error()] == [None, None]


def test_a_process_that_stays_after_it_was_refused_is_dropped(start, monkeypatch):
    monkeypatch.setattr(gather, "HELLO_SECS", 0.1)
    cluster = cluster_of(2)
    first = start(cluster[0])
    with connect(cluster) as refused:
        refused.sendall(hello_of(cluster[1], job_id="another"))
        until(lambda: is_closed(refused))
    assert [start(cluster[1]).error(), first.error()] == [None, None]


def test_a_member_that_leaves_may_come_back(start):
    cluster = cluster_of(3)
    first = start(cluster[0], say_every_secs=0.05)
    with connect(cluster) as sock:
        sock.sendall(hello_of(cluster[1]))
        until(lambda: any("Connected: worker 1" in line for line in first.lines))
    until(lambda: "Connected: none" in first.lines[-1])
    assert [member.error() for member in (start(cluster[1]), start(cluster[2]), first)] == [None] * 3


@pytest.mark.slow
def test_a_member_that_left_for_good_is_named(start):
    cluster = cluster_of(3)
    first = start(cluster[0], timeout_secs=SHORT_SECS)
    with connect(cluster) as sock:
        sock.sendall(hello_of(cluster[1]))
        sock.recv(1)
    assert re.search(r"worker 1 had connected, but left \d+\.\d s ago", str(first.error()))


def test_a_member_tries_again_when_process_0_restarts(start):
    cluster = cluster_of(2)
    with socket.create_server(("127.0.0.1", port_of(cluster))) as server:
        second = start(cluster[1], say_every_secs=ALWAYS)
        accepted, _ = server.accept()
        server.close()
        accepted.close()
        until(lambda: any("it closed the connection" in line for line in second.lines))
    assert [start(cluster[0]).error(), second.error()] == [None, None]


def test_a_member_tries_again_when_process_0_falls_silent(start, monkeypatch):
    monkeypatch.setattr(join, "SILENCE_SECS", 0.1)
    cluster = cluster_of(2)
    with socket.create_server(("127.0.0.1", port_of(cluster))) as server:
        second = start(cluster[1], say_every_secs=ALWAYS)
        silent = server.accept()[0]
        until(lambda: any("it has not answered for 0.1 s" in line for line in second.lines))
        server.close()
        silent.close()
    monkeypatch.setattr(join, "SILENCE_SECS", LONG_SECS)
    assert [start(cluster[0]).error(), second.error()] == [None, None]


def test_another_program_on_process_0_s_port_is_named(start):
    cluster = cluster_of(2)
    with socket.create_server(("127.0.0.1", port_of(cluster))) as server:
        server.settimeout(0.1)
        second = start(cluster[1], timeout_secs=SHORT_SECS)
        while not second.future.done():
            with contextlib.suppress(TimeoutError):
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"SSH-2.0-OpenSSH\r\n")
                    accepted.recv(4096)
        assert "another program answers there, or another version of trainer" in str(second.error())


@pytest.mark.slow
def test_a_program_that_only_listens_on_process_0_s_port_is_named(start):
    cluster = cluster_of(2)
    with socket.create_server(("127.0.0.1", port_of(cluster))):
        error = start(cluster[1], timeout_secs=SHORT_SECS).error()
    assert isinstance(error, ClusterTimeout) and "it accepts the connection but does not answer" in str(error)


def test_a_socket_that_was_connected_to_itself_counts_as_refused(monkeypatch):
    port = free_port()

    def connect_to_itself(address, timeout):
        sock = socket.socket()
        sock.bind(address)
        sock.connect(address)
        return sock

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    with pytest.raises(ConnectionRefusedError, match="connected to itself"):
        join.connect(f"127.0.0.1:{port}", 1.0)
    assert is_free(port)


@pytest.mark.parametrize("process_id", [0, 1])
def test_an_interrupt_ends_the_wait_and_frees_the_port(process_id):
    def interrupt(line):
        raise KeyboardInterrupt

    cluster = cluster_of(2)
    with pytest.raises(KeyboardInterrupt):
        agree(cluster[process_id], LONG_SECS, interrupt, say_every_secs=0.05)
    assert is_free(port_of(cluster))


@pytest.mark.slow
def test_a_received_name_cannot_steer_the_terminal_nor_forge_a_line(start):
    cluster = cluster_of(3)
    members = [start(cluster[0]), start(cluster[1])]
    with connect(cluster) as sock:
        sock.sendall(hello_of(cluster[2], process="\x1b[2J\nhost", versions={"jax": "\x1b]0;x\x07"}))
        for member in members:
            message = str(member.error())
            assert "its jax is '\\x1b]0;x\\x07'" in message and "\\x1b[2J\\nhost" in message and "\x1b" not in message
            assert [line[:10] for line in message.split("\n")] == ["The proces", "- worker 2", "Start all "]


def test_what_process_0_says_is_escaped_too():
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joining = pool.submit(agree, ClusterDescription((address, "127.0.0.1:1"), 1), LONG_SECS)
        with server.accept()[0] as sock:
            sock.sendall(encode({"kind": "failed", "lines": ["a\x1b\nb", 3]}))
            assert str(joining.exception(GUARD_SECS)) == "a\\x1b\\nb\n3"


def test_a_job_id_that_is_not_printable_is_its_own(start):
    members = [start(description, job_id="\x07\n") for description in cluster_of(2)]
    assert [member.error() for member in members] == [None, None]


# The packages' own __init__ files would import JAX, which takes seconds.
PROCESS = """
import json, sys, types
for name, path in json.loads(sys.argv[1]).items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from trainer.distribute.cluster.description.cluster_resolver import resolve_cluster
from trainer.distribute.cluster.rendezvous.rendezvous import agree
assert "jax" not in sys.modules
try:
    agree(resolve_cluster(), float(sys.argv[2]), say_every_secs=0.1).close()
except (ValueError, TimeoutError) as error:
    print(type(error).__name__, error)
else:
    print("agreed")
"""


def start_process(addresses, index, timeout_secs=LONG_SECS):
    folder = project_files.ROOT / "trainer"
    packages = json.dumps({"trainer": str(folder), "trainer.distribute": str(folder / "distribute"),
                           "trainer.distribute.cluster": str(folder / "distribute" / "cluster")})
    tf_config = json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})
    return subprocess.Popen([sys.executable, "-c", PROCESS, packages, str(timeout_secs)],
                            env={**os.environ, "TF_CONFIG": tf_config}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(process) -> str:
    return process.communicate(timeout=GUARD_SECS)[0]


@pytest.mark.slow
def test_real_processes_meet_though_one_is_killed_and_started_again():
    addresses = cluster_of(3)[0].addresses
    processes = [start_process(addresses, index) for index in range(2)]
    assert "awaits" in processes[1].stdout.readline()
    processes[1].send_signal(signal.SIGKILL)
    finished(processes[1])
    outputs = [finished(process) for process in
               [start_process(addresses, 1), start_process(addresses, 2), processes[0]]]
    assert [output.splitlines()[-1] for output in outputs] == ["agreed"] * 3


@pytest.mark.slow
def test_real_processes_name_the_one_that_is_missing():
    addresses = cluster_of(3)[0].addresses
    processes = [start_process(addresses, 0)]
    assert "awaits" in processes[0].stdout.readline()
    processes.append(start_process(addresses, 1, timeout_secs=1.0))
    for output in map(finished, processes):
        assert "ClusterTimeout worker 1 " in output
        assert "gave up after its own timeout: 1 of 3 processes are missing: worker 2 (127.0.0.1:2)" in output


MEETS_WITH_FEW_DESCRIPTORS = """
import json, logging, resource, sys
from trainer.distribute.cluster.description.cluster_description import ClusterDescription
from trainer.distribute.cluster.rendezvous.rendezvous import agree

logging.basicConfig()
addresses, names = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
agree(ClusterDescription(tuple(addresses), 0, "worker", tuple(names)), 600.0, print, "job").close()
"""


@pytest.mark.processes
@pytest.mark.slow
def test_strangers_that_take_all_descriptors_keep_nobody_out(start):
    cluster = cluster_of(2)
    arguments = json.dumps([cluster[0].addresses, cluster[0].names])
    with (contextlib.ExitStack() as stack,
          subprocess.Popen([sys.executable, "-c", MEETS_WITH_FEW_DESCRIPTORS, arguments], cwd=project_files.ROOT,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first):
        stack.callback(first.kill)
        until(lambda: not is_free(port_of(cluster)))
        for _ in range(60):
            stack.enter_context(connect(cluster))
        assert start(cluster[1]).error() is None
        _, errors = first.communicate(timeout=GUARD_SECS)
        assert (first.returncode, errors.count("has no file descriptor for it: Too many open files")) == (0, 1), errors
