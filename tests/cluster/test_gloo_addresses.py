"""CPU devices of several machines reach each other only where the machines' host names lead to them."""

import functools
import socket

import pytest

from tests.support.rendezvous_cluster import cluster_of
from trainer.distribute.cluster.rendezvous import gather, join, rendezvous
from trainer.distribute.cluster.rendezvous.gloo_addresses import Place, own_gloo_address, why_not_connected


def places(*pairs):
    return [Place(f"worker {number}", machine, address) for number, (machine, address) in enumerate(pairs)]


# What trained, and what failed in the first step, between two machines with jax 0.10.2.
@pytest.mark.parametrize("pairs", [
    [("a", "10.77.0.1"), ("b", "10.77.0.2")],
    [("a", "127.0.1.1"), ("b", "10.77.0.2")],
    [("a", "10.77.0.1"), ("b", "127.0.1.1")],
    [("a", "fd77::1"), ("b", "fd77::2")],
    [("a", "127.0.1.1"), ("a", "127.0.1.1"), ("a", "127.0.0.1")],
    [("a", "127.0.1.1"), ("a", "127.0.1.1"), ("b", "10.77.0.2")],
])
def test_machines_whose_host_names_lead_to_them_are_connected(pairs):
    assert why_not_connected(places(*pairs)) == ""


@pytest.mark.parametrize(("pairs", "named"), [
    ([("a", "127.0.1.1"), ("b", "127.0.1.1")], (0, 1)),
    ([("a", "127.0.1.1"), ("b", "192.168.77.2")], (0, 1)),
    ([("a", "192.168.77.1"), ("b", "127.0.1.1")], (0, 1)),
    ([("a", "::1"), ("b", "fd77::2")], (0, 1)),
    ([("a", "10.77.0.1"), ("b", "fd77::2")], (0, 1)),
    ([("a", "10.77.0.1"), ("b", "127.0.1.1"), ("b", "127.0.1.1"), ("c", "127.0.1.1")], (1, 3)),
])
def test_two_processes_that_cannot_reach_each_other_are_named_with_the_fix(pairs, named):
    one, other = (f"worker {number} ({pairs[number][1]})" for number in named)
    text = why_not_connected(places(*pairs))
    assert text.startswith(f"The CPU devices of {one} and {other} cannot reach each other: ")
    assert "'10.0.0.1 host1' in its /etc/hosts in the place of '127.0.1.1 host1'" in text


def test_a_host_name_without_an_address_is_named():
    text = why_not_connected(places(("a", "10.77.0.1"), ("b", "")))
    assert "worker 1 cannot be reached: the host name of its machine has no address" in text and "/etc/hosts" in text


def test_the_first_address_of_the_host_name_that_can_be_bound_counts(monkeypatch):
    found = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("192.0.2.1", "127.0.1.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kwargs: found)
    assert own_gloo_address() == "127.0.1.1"
    del found[1:]
    assert own_gloo_address() == ""


def test_a_host_name_may_lead_nowhere(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 70 + ".invalid")
    assert own_gloo_address() == ""


@pytest.fixture
def two_machines(monkeypatch):
    """Lets all members but the first connect from another address, as from another machine."""
    monkeypatch.setattr(gather, "is_loopback", lambda host: False)
    monkeypatch.setattr(join.socket, "create_connection",
                        functools.partial(socket.create_connection, source_address=("127.0.0.2", 0)))


@pytest.mark.parametrize("address", ["127.0.1.1", "10.77.0.1"])
def test_all_hear_of_host_names_that_lead_to_loopback_on_two_machines(start, monkeypatch, two_machines, address):
    monkeypatch.setattr(rendezvous, "own_gloo_address", lambda: address)
    members = [start(description) for description in cluster_of(3)]
    texts = [member.unconnected() for member in members]
    assert texts[0] == texts[1] == texts[2]
    assert ("worker 0 (127.0.0.1:" in texts[0] and " cannot reach each other" in texts[0]) == (address == "127.0.1.1")


def test_on_one_machine_the_host_name_may_lead_to_loopback(start, monkeypatch):
    monkeypatch.setattr(rendezvous, "own_gloo_address", lambda: "127.0.1.1")
    assert [member.unconnected() for member in [start(description) for description in cluster_of(2)]] == ["", ""]
