"""What becomes of the connections of a meeting: what is said over them, and how they end."""

import errno
from types import SimpleNamespace

import pytest

from tests.support.rendezvous_cluster import stars_of


@pytest.fixture
def stars():
    started = stars_of(3)
    yield started
    for star in reversed(started):
        star.close()


def received(star):
    return [pair for _ in range(3) for pair in star.receive(0.01)]


def test_the_first_speaks_with_all_others_and_these_with_the_first_alone(stars):
    stars[0].tell({"a": 1})
    stars[1].tell({"b": 2})
    assert [received(star) for star in stars] == [[(1, {"b": 2})], [(0, {"a": 1})], [(0, {"a": 1})]]


def test_a_wait_ends_when_it_is_woken(stars):
    for _ in range(10**5):
        stars[1].wake()
    assert stars[1].receive(60.0) == [(1, {})]


def test_who_does_not_read_is_sent_only_the_last_word(stars):
    for _ in range(2000):
        stars[1].tell({"text": 1000 * "x"})
    stars[1].tell({"last": True}, is_last=True)
    messages = []
    while not messages or messages[-1] != (1, {"last": True}):
        messages += stars[0].receive(1.0)
        stars[1].receive(0.01)  # sends the rest
    assert len(messages) < 1000


def test_the_end_of_a_connection_comes_after_what_was_said(stars):
    stars[2].tell({"last": True})
    stars[2].close()
    assert received(stars[0]) == [(2, {"last": True}), (2, None)]
    stars[0].tell({"a": 1})
    assert received(stars[1]) == [(0, {"a": 1})]


def test_another_program_s_words_end_a_connection(stars):
    stars[1].connections[0]._sock.send(b"GET / HTTP/1.1\r\n")
    assert received(stars[0]) == [(1, None)]


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize(("error", "is_cut"), [
    (ConnectionResetError(), False), (BrokenPipeError(), False), (TimeoutError(), True),
    (OSError(errno.EHOSTUNREACH, ""), True)])
def test_an_end_that_comes_from_the_network_is_told_from_that_of_a_process(stars, error, is_cut, sends):
    def fail(*_):
        raise error

    connection = stars[0].connections[1]
    sock = connection._sock
    connection._sock = SimpleNamespace(
        send=fail if sends else sock.send, recv=sock.recv if sends else fail, fileno=sock.fileno, close=sock.close)
    connection._selector = SimpleNamespace(get_key=lambda _: SimpleNamespace(events=1), unregister=lambda _: None)
    connection.send({})
    stars[1].close()
    connection.receive()
    assert connection.ended and connection.is_cut == is_cut
    stars[0]._selector.unregister(sock)
