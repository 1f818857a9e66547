"""`prefetch`: order, errors, and a thread that never outlives its use."""

import gc
import sys
import threading
import time

import jax
import numpy as np
import pytest

from tests.support.clock import StandingClock
from tests.support.waiting import GUARD_SECS, until
from trainer.core.ambient.threads import in_caller_context
from trainer.data.adapt import adapt
from trainer.data.prefetch import Demand, is_abandoned, prefetch
from trainer.data.reader import Reader
from trainer.data.sources.arrays import canonical_dtype


@pytest.fixture(autouse=True)
def long_join(monkeypatch):
    """Makes a prefetcher wait for a thread that ends late."""
    # The function hides its module as an attribute of the package.
    monkeypatch.setattr(sys.modules["trainer.data.prefetch"], "_JOIN_TIMEOUT_SECS", GUARD_SECS)


@pytest.fixture(autouse=True)
def no_leaked_threads():
    before = set(threading.enumerate())
    yield
    leaked = set(threading.enumerate()) - before
    assert not leaked, leaked


def identity(group):
    return group


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_groups_come_placed_and_in_order(depth):
    with prefetch(iter(range(50)), lambda group: group + 100, depth) as ready:
        assert list(ready) == list(range(100, 150))
        assert list(ready) == []


def test_no_more_than_depth_groups_are_placed_ahead():
    placed = []
    third = threading.Event()

    def place(group):
        placed.append(group)
        if len(placed) == 3:
            third.set()
        return group

    with prefetch(iter(range(10)), place, depth=2) as ready:
        assert next(ready) == 0
        assert third.wait(GUARD_SECS)
        time.sleep(0.05)
        assert placed == [0, 1, 2]


@pytest.mark.parametrize("failing", ["groups", "place"])
def test_an_exception_is_raised_after_the_groups_before_it_with_its_traceback(failing):
    def broken(value):
        raise OSError(f"disk gone at {value}")

    def groups():
        yield from (0, 1)
        yield broken(2) if failing == "groups" else 2

    def place(group):
        return broken(group) if group == 2 else group

    ready = prefetch(groups(), place)
    assert [next(ready), next(ready)] == [0, 1]
    with pytest.raises(OSError, match="disk gone at 2") as caught:
        next(ready)
    assert "broken" in [entry.name for entry in caught.traceback]
    assert list(ready) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_leaving_the_block_by_an_exception_closes_the_groups(error):
    closed = threading.Event()

    def groups():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    def consume():
        with prefetch(groups(), identity) as ready:
            next(ready)
            raise error

    with pytest.raises(error):
        consume()
    assert closed.is_set()


def test_close_ends_a_thread_that_waits_for_a_place_and_may_be_repeated():
    ready = prefetch(iter(range(1000)), identity)
    next(ready)
    until(lambda: ready._channel.ready.qsize() == 2)  # all that there is room for
    ready.close()
    assert not ready._thread.is_alive()
    ready.close()
    assert list(ready) == []


def test_a_group_pulled_while_closing_is_not_placed():
    entered, release, placed = threading.Event(), threading.Event(), []

    def groups():
        entered.set()
        release.wait(GUARD_SECS)
        yield 1

    ready = prefetch(groups(), placed.append)
    assert entered.wait(GUARD_SECS)
    closer = threading.Thread(target=ready.close)
    closer.start()
    time.sleep(0.05)
    release.set()
    closer.join()
    assert placed == []


def test_no_group_is_pulled_after_closing():
    pulled, placed = [], threading.Semaphore(0)

    def groups():
        for number in range(9):
            pulled.append(number)
            yield number

    ready = prefetch(groups(), lambda group: placed.release(), depth=2)
    assert placed.acquire(timeout=GUARD_SECS) and placed.acquire(timeout=GUARD_SECS)  # all that there is room for
    ready.close()
    assert pulled == [0, 1]


@pytest.mark.parametrize("steps", [None, 5])
def test_a_pipeline_that_hangs_can_be_left_and_is_closed_when_it_returns(monkeypatch, steps):
    monkeypatch.setattr(sys.modules["trainer.data.prefetch"], "_JOIN_TIMEOUT_SECS", 0.05)
    entered, release, closed = threading.Event(), threading.Event(), threading.Event()

    class Hangs:
        def __iter__(self):
            try:
                yield np.ones(2)
                entered.set()
                release.wait(GUARD_SECS)
                yield np.ones(2)
            finally:
                closed.set()

    with Reader(adapt(Hangs()), steps) as reader, prefetch(reader.read(0), identity) as ready:
        next(ready)
        assert entered.wait(GUARD_SECS)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "trainer-prefetch"]
    assert not closed.is_set()
    release.set()
    thread.join(GUARD_SECS)
    assert closed.wait(GUARD_SECS)


@pytest.mark.slow
def test_a_prefetcher_that_is_dropped_ends_its_thread():
    ready = prefetch(iter(range(1000)), identity)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "trainer-prefetch"]
    next(ready)
    del ready
    gc.collect()
    thread.join(GUARD_SECS)
    assert not thread.is_alive()


def test_the_thread_has_the_callers_jax_settings():
    device = jax.devices()[-1]

    def settings(_):
        return jax.config.jax_default_device, canonical_dtype(np.dtype("f8"))

    with jax.default_device(device), jax.enable_x64(True), prefetch(iter([0]), settings) as ready:
        assert next(ready) == (device, np.float64)


@pytest.mark.parametrize(("depth", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_a_depth_that_is_no_positive_integer_is_refused(depth, error):
    with pytest.raises(error, match="`depth` must be a whole number"):
        prefetch(iter([]), identity, depth)


def test_it_is_urgent_once_the_consumer_has_waited_for_longer_than_its_patience(monkeypatch):
    clock = StandingClock()
    monkeypatch.setattr(sys.modules["trainer.data.prefetch"], "time", clock)
    demand = Demand(patience_secs=5.0)
    seen = []

    def slow():
        until(demand.is_there)
        for _ in range(2):
            clock.now += 3.0
            seen.append(demand.is_urgent())
        yield 0
        clock.now += 60.0  # it is made ahead, and nobody waits for it
        seen.append(demand.is_urgent())
        yield 1

    assert not demand.is_urgent()
    with prefetch(slow(), identity, depth=1, demand=demand) as ready:
        assert next(ready) == 0
        until(lambda: len(seen) == 3)
        assert next(ready) == 1
    assert seen == [False, True, False]
    assert not demand.is_urgent()


def test_threads_that_a_pipeline_starts_know_that_it_was_abandoned():
    entered, release, seen = threading.Event(), threading.Event(), []

    def look():
        entered.set()
        release.wait(GUARD_SECS)
        seen.append(is_abandoned())

    def groups():
        worker = threading.Thread(target=in_caller_context(look))
        worker.start()
        worker.join()
        yield 1

    ready = prefetch(groups(), identity)
    assert entered.wait(GUARD_SECS)
    closer = threading.Thread(target=ready.close)
    closer.start()
    while not ready._channel.is_stopped:
        time.sleep(0.001)
    release.set()
    closer.join()
    assert seen == [True] and not is_abandoned()
