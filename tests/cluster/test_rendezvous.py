"""Processes meet before JAX starts, over real sockets on loopback: who agrees, who differs, who is missing."""

import errno
import os
import re
import socket
import threading
import time

import pytest

from tests.support.rendezvous_cluster import (
    SHORT_SECS,
    cluster_of,
    connect,
    free_port,
    hello_of,
    is_free,
    port_of,
)
from tests.support.waiting import GUARD_SECS, LONG_SECS, until
from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError, ClusterTimeout
from trainer.distribute.cluster.rendezvous import gather, join, listen
from trainer.distribute.cluster.rendezvous.connection import encode
from trainer.distribute.cluster.rendezvous.hello import Hello
from trainer.distribute.cluster.rendezvous.rendezvous import agree


def test_all_return_when_all_are_there_and_alike(start, monkeypatch):
    for name in ("GRACE_SECS", "STATUS_SECS"):
        monkeypatch.setattr(gather, name, LONG_SECS)  # nobody waits for them
    cluster = cluster_of(4)
    members = [start(description) for description in cluster]
    assert [member.error() for member in members] == [None] * 4
    assert [member.lines for member in members] == [[]] * 4
    assert is_free(port_of(cluster))


@pytest.mark.slow
def test_nobody_returns_before_the_last_has_come(start):
    cluster = cluster_of(3)
    members = [start(description) for description in cluster[:2]]
    time.sleep(0.3)
    assert not any(member.future.done() for member in members)
    members.append(start(cluster[2]))
    assert [member.error() for member in members] == [None] * 3


@pytest.mark.slow
def test_process_0_may_come_last(start):
    cluster = cluster_of(2)
    late = start(cluster[1])
    time.sleep(0.2)
    assert [start(cluster[0]).error(), late.error()] == [None, None]


def test_one_process_alone_needs_no_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        agree(ClusterDescription((f"127.0.0.1:{server.getsockname()[1]}",), 0), 1.0).close()


@pytest.mark.parametrize(("odd", "words"), [
    ({"versions": {"jax": "4", "trainer": "1"}}, ["its jax is '4', not '3' as on worker 0"]),
    ({"versions": {"trainer": "1"}}, ["its jax is none, not '3' as on worker 0"]),
])
def test_everybody_hears_who_differs_in_what(start, monkeypatch, odd, words):
    monkeypatch.setattr(gather, "GRACE_SECS", LONG_SECS)  # of no use when all are there
    cluster = cluster_of(3)
    same = {"versions": {"jax": "3", "trainer": "1"}}
    members = [start(description, **{**same, **(odd if index == 1 else {})})
               for index, description in enumerate(cluster)]
    for member in members:
        error = member.error()
        assert isinstance(error, ClusterError)
        message = str(error)
        assert [word for word in [*words, "worker 1 (127.0.0.1:1)", f"pid {os.getpid()}"] if word not in message] == []
        assert "worker 2" not in message
    assert is_free(port_of(cluster))


@pytest.mark.parametrize(("change", "word"), [
    (lambda addresses: (*addresses, "127.0.0.1:9"), "its cluster has 4 processes, not 3 as on worker 0"),
    (lambda addresses: (*addresses[:2], "10.0.0.9:9"),
     "its cluster has '10.0.0.9:9' as address 2, not '127.0.0.1:2' as on worker 0"),
])
def test_another_list_of_addresses_is_told_to_all(start, change, word):
    cluster = cluster_of(3)
    cluster[1] = ClusterDescription(change(cluster[1].addresses), 1)
    for member in [start(description) for description in cluster]:
        error = member.error()
        assert isinstance(error, ClusterError) and word in str(error)


@pytest.mark.slow
def test_a_difference_is_told_even_if_others_are_still_missing_at_the_deadline(start, monkeypatch):
    monkeypatch.setattr(gather, "GRACE_SECS", LONG_SECS)
    cluster = cluster_of(3)
    members = [start(cluster[0], timeout_secs=SHORT_SECS), start(cluster[1], versions={"jax": "none"})]
    for member in members:
        error = member.error()
        assert isinstance(error, ClusterError) and "its jax is 'none'" in str(error)


def test_a_process_of_another_job_is_refused_and_told_why_and_the_start_goes_on(start):
    cluster = cluster_of(2)
    first = start(cluster[0])
    for _ in range(2):
        error = start(cluster[1], job_id="another").error()
        assert isinstance(error, ClusterError)
        assert "worker 0 (127.0.0.1:" in str(error) and "has refused this process" in str(error)
        assert "its job id is 'another', not 'job' as on worker 0" in str(error) and "TRAINER_JOB_ID" in str(error)
    line, = first.lines
    assert line.startswith("Warning: worker 0 has refused a process of another job, and goes on without it. worker 1 ")
    assert f"pid {os.getpid()}" in line and "its job id is 'another'" in line
    assert [start(cluster[1]).error(), first.error()] == [None, None]
    assert len(first.lines) == 1


@pytest.mark.parametrize(("ids", "word"), [
    (("", ""), "its cluster has 3 processes, not 2 as on worker 0"),
    (("", "job 7"), "its job id is 'job 7', not none as on worker 0"),
    (("job 7", ""), "its job id is none, not 'job 7' as on worker 0"),
])
def test_without_two_job_ids_what_differs_is_a_mistake_that_all_are_told(start, monkeypatch, ids, word):
    monkeypatch.delenv("TRAINER_JOB_ID", raising=False)
    cluster = cluster_of(2)
    other = ClusterDescription((*cluster[1].addresses, "127.0.0.1:9"), 1)
    for member in (start(cluster[0], job_id=ids[0]), start(other, job_id=ids[1])):
        error = member.error()
        assert isinstance(error, ClusterError) and word in str(error) and "refused" not in str(error)


def test_who_was_refused_is_named_at_the_deadline(start):
    cluster = cluster_of(2)
    first = start(cluster[0], timeout_secs=SHORT_SECS)
    start(cluster[1], job_id="another")
    error = first.error()
    assert isinstance(error, ClusterTimeout), "the right one may come when the job is started again"
    assert "These came, but are of another job: worker 1 (127.0.0.1:1), pid " in str(error)
    assert "its job id is 'another', not 'job' as on worker 0." in str(error)


def test_what_a_refused_process_says_does_not_matter(start):
    cluster = cluster_of(2)
    first = start(cluster[0])
    with connect(cluster) as sock:
        sock.sendall(hello_of(cluster[1], job_id="another") + encode({"kind": "gave_up"}))
        until(lambda: first.lines)
        assert [start(cluster[1]).error(), first.error()] == [None, None]


def test_two_processes_with_one_index_are_told_to_all(start):
    cluster = cluster_of(3)
    members = [start(cluster[index]) for index in (0, 1, 1)]
    for member in members:
        error = member.error()
        assert isinstance(error, ClusterError)
        assert "Two processes are worker 1 (127.0.0.1:1)" in str(error) and "index of its own" in str(error)
    assert is_free(port_of(cluster))


@pytest.mark.slow
def test_a_number_outside_of_the_cluster_is_told(start):
    cluster = cluster_of(2)
    first = start(cluster[0])
    with connect(cluster) as sock:
        sock.sendall(hello_of(cluster[1], process_id=7))
        assert "its number is not from 1 to 1" in str(first.error())


@pytest.mark.slow
def test_at_the_deadline_all_hear_who_is_missing(start):
    cluster = cluster_of(3)
    members = [start(cluster[0], timeout_secs=SHORT_SECS), start(cluster[1])]
    for member in members:
        error = member.error()
        assert isinstance(error, ClusterTimeout)
        assert "After 0.4 s, 1 of 3 processes are missing: worker 2 (127.0.0.1:2)" in str(error)
        assert "Connected: worker 1 (127.0.0.1:1)" in str(error) and "was not started" in str(error)
    assert is_free(port_of(cluster))


def test_the_shortest_timeout_counts_for_all(start, monkeypatch):
    monkeypatch.setattr(join, "LAST_WORDS_SECS", GUARD_SECS)
    cluster = cluster_of(4)
    members = [start(cluster[0]), start(cluster[1], timeout_secs=SHORT_SECS), start(cluster[2])]
    for member in members:
        error = member.error()
        assert isinstance(error, ClusterTimeout)
        assert "worker 1 (127.0.0.1:1)" in str(error) and "gave up after its own timeout" in str(error)
        assert "missing: worker 3 (127.0.0.1:3)" in str(error)
    assert is_free(port_of(cluster))


def test_while_waiting_each_says_whom_it_awaits_and_why(start, monkeypatch):
    monkeypatch.setattr(gather, "STATUS_SECS", LONG_SECS)  # a member is told at once, when it comes
    cluster = cluster_of(3)
    late = start(cluster[1], say_every_secs=0.1)
    until(lambda: late.lines)
    assert re.fullmatch(
        rf"worker 1 awaits worker 0 \(127\.0\.0\.1:{port_of(cluster)}\): connection refused, nothing listens on port "
        rf"{port_of(cluster)} yet\. \(\d+ s of {LONG_SECS:g} s\)", late.lines[0])
    first = start(cluster[0], say_every_secs=0.1)
    until(lambda: any("Connected: worker 1" in line for line in first.lines))
    until(lambda: any("it is there, and awaits worker 2 (127.0.0.1:2)" in line for line in late.lines))
    assert first.lines[-1].startswith("worker 0 awaits worker 2 (127.0.0.1:2). Connected: worker 1 (127.0.0.1:1).")
    assert [member.error() for member in (start(cluster[2]), first, late)] == [None] * 3


@pytest.mark.parametrize(("error", "words"), [
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "'127.0.0.1' does not resolve (Name or service"),
    (TimeoutError("timed out"), "no answer at all, as with a wrong address or a firewall"),
    (OSError(errno.EHOSTUNREACH, "No route to host"), "cannot be reached (No route to host)"),
])
def test_the_error_says_why_process_0_does_not_answer(monkeypatch, error, words):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    cluster = cluster_of(2)
    with pytest.raises(ClusterTimeout) as caught:
        agree(cluster[1], 0.2)
    message = str(caught.value)
    assert words in message
    assert "worker 1 did not meet the other processes within 0.2 s. It awaited worker 0 (127.0.0.1:" in message


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_a_port_in_use_is_an_error_at_once_even_if_its_owner_would_share_it(shared, host):
    with socket.socket() as holder:
        if shared:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"Port {port} is in use, and process 0 .*TF_CONFIG"):
            agree(ClusterDescription((f"{host}:{port}", f"{host}:1"), 0), LONG_SECS)


def test_while_process_0_listens_nobody_else_can(start):
    cluster = cluster_of(2)
    first = start(cluster[0])
    connect(cluster).close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port_of(cluster)))
    assert [start(cluster[1]).error(), first.error()] == [None, None]


@pytest.mark.parametrize(("host", "expected"), [("localhost", {"127.0.0.1", "::1"}), ("127.0.0.1", {"127.0.0.1"}),
                                                ("worker-0.jobs", {"::", "0.0.0.0"})])
def test_only_loopback_is_bound_for_a_loopback_address(host, expected):
    listeners = listen.listen(ClusterDescription((f"{host}:{free_port()}",), 0))
    bound = {listener.getsockname()[0] for listener in listeners}
    listen.close_all(listeners)
    assert bound and bound <= expected


@pytest.mark.parametrize("absent", ["192.0.2.1", "::1"])
def test_an_address_of_localhost_that_the_machine_lacks_is_skipped(monkeypatch, absent):
    found = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)),
             (socket.AF_INET6 if ":" in absent else socket.AF_INET, 1, 6, "", (absent, 0))]
    create = socket.create_server

    def create_server(address, **kwargs):
        if address[0] == absent:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, **kwargs)

    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    listeners = listen.listen(ClusterDescription((f"localhost:{free_port()}",), 0))
    assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.1"]
    listen.close_all(listeners)
    found.pop(0)
    with pytest.raises(ClusterError, match=r"process 0 .* cannot listen on port .*: Cannot assign"):
        listen.listen(ClusterDescription((f"localhost:{free_port()}",), 0))


@pytest.mark.parametrize(("arguments", "error", "match"), [
    ({"timeout_secs": 0}, ValueError, "`timeout_secs` must be a number above 0. Received: timeout_secs=0"),
    ({"timeout_secs": float("nan")}, ValueError, "`timeout_secs` must be a number above 0. Received: timeout_secs=nan"),
    ({"say_every_secs": -1}, ValueError, "`say_every_secs` must be a number above 0"),
    ({"description": ClusterDescription(("a:1", "b:1"), None, "evaluator")}, ClusterError, "'evaluator' does not meet"),
])
def test_arguments_are_checked_first(arguments, error, match):
    with pytest.raises(error, match=match):
        agree(**{"description": ClusterDescription(("a:1", "b:1"), 1), "timeout_secs": 0.1, **arguments})


def test_the_job_id_comes_from_the_environment(start, monkeypatch):
    cluster = cluster_of(2)
    monkeypatch.setenv("TRAINER_JOB_ID", "job 7")
    first = start(cluster[0])
    second = start(cluster[1], job_id=None)
    assert "its job id is 'job 7', not 'job' as on worker 0" in str(second.error())
    assert [start(cluster[1]).error(), first.error()] == [None, None]
    members = [start(description, job_id=None) for description in cluster]
    assert [member.error() for member in members] == [None, None]


def test_many_differences_are_summed_up():
    hellos = [Hello(("a:1",), 0, "job", {f"{key}": value for key in range(50)}, "", "") for value in ("1", "2")]
    differences = hellos[0].differences(hellos[1], "worker 0")
    assert len(differences) == 9 and differences[-1] == "and 42 more"


def test_no_thread_is_needed(start):
    cluster = cluster_of(2)
    before = threading.active_count()
    first = start(cluster[0])
    connect(cluster).close()
    assert threading.active_count() <= before + 1
    assert [start(cluster[1]).error(), first.error()] == [None, None]


class Full:
    """A listener whose process has no file descriptor left."""

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_process_without_free_descriptors_pauses_or_makes_room_and_says_so_once(monkeypatch, caplog):
    pauses = []
    monkeypatch.setattr(listen.time, "sleep", pauses.append)
    monkeypatch.setattr(listen, "_said_at", -listen._SAY_SECS)
    assert listen.accepted(Full(), lambda: True) is None
    assert pauses == []
    assert [listen.accepted(Full()) for _ in range(3)] == [None] * 3
    assert pauses == [listen._PAUSE_SECS] * 3
    assert caplog.text.count("has no file descriptor for it: Too many open files. Raise the limit (`ulimit -n`)") == 1
