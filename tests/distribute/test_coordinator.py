"""ClusterCoordinator: what TensorFlow promises of the queue, on workers that are threads."""

from __future__ import annotations

import collections
import concurrent.futures
import gc
import threading
import time

import numpy as np
import pytest

from tests.support.inline_cluster import InlineStrategy, lose_current
from tests.support.waiting import GUARD_SECS, until
from trainer import distribute
from trainer.distribute import ClusterCoordinator, WorkerLostError
from trainer.distribute.parameter_server import coordinator as module

gate = threading.Event()
seen: list[object] = []


@pytest.fixture
def coordinator():
    gate.clear()
    seen.clear()
    strategy = InlineStrategy()
    made = ClusterCoordinator(strategy)
    yield made
    gate.set()
    made.close()


def double(x, plus=0):
    return 2 * x + plus


def wait_for_gate(value=None):
    gate.wait(GUARD_SECS)
    seen.append(value)
    return value


def fail(message="boom"):
    raise ValueError(message)


def test_values_come_back_in_any_structure(coordinator):
    values = {"a": [coordinator.schedule(double, (np.arange(3),)), 5],
              "b": coordinator.schedule(double, (4,), {"plus": 1})}
    fetched = coordinator.fetch(values)
    np.testing.assert_array_equal(fetched["a"][0], [0, 2, 4])
    assert (fetched["a"][1], fetched["b"]) == (5, 9)
    assert values["b"].get() == 9
    assert coordinator.done()


def test_schedule_returns_at_once_and_done_says_whether_all_have_ended(coordinator):
    value = coordinator.schedule(wait_for_gate, (1,))
    assert not coordinator.done()
    gate.set()
    coordinator.join()
    assert coordinator.done() and value.fetch() == 1


@pytest.mark.slow
def test_a_full_queue_makes_schedule_wait(coordinator, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 3)
    scheduled = []

    def schedule():
        for number in range(8):
            scheduled.append(coordinator.schedule(wait_for_gate, (number,)))

    thread = threading.Thread(target=schedule)
    thread.start()
    time.sleep(0.3)
    assert len(scheduled) <= 5  # two that run, and three that wait
    gate.set()
    thread.join(GUARD_SECS)
    assert coordinator.fetch(scheduled) == list(range(8))


def test_one_coordinator_for_a_strategy(coordinator):
    assert ClusterCoordinator(coordinator.strategy) is coordinator
    with pytest.raises(ValueError, match=r"must be a ParameterServerStrategy.*Received"):
        ClusterCoordinator(distribute.OneDeviceStrategy())


def test_a_remote_value_is_no_argument(coordinator):
    value = coordinator.schedule(double, (1,))
    with pytest.raises(ValueError, match=r"`RemoteValue` cannot be an argument.*`fetch`"):
        coordinator.schedule(double, ([value],))


def test_what_is_no_function_is_refused(coordinator):
    with pytest.raises(TypeError, match="`fn` must be a function"):
        coordinator.schedule(3)


def test_what_cannot_be_sent_is_refused_at_once(coordinator):
    with pytest.raises(TypeError, match=r"`double` or its arguments cannot be sent.*inside of the function"):
        coordinator.schedule(double, (threading.Lock(),))
    assert coordinator.schedule(double, (1,)).fetch() == 2


class _CountingQueue(collections.deque):
    asked = 0

    def __len__(self):
        self.asked += 1
        return super().__len__()


def test_a_function_wakes_one_of_many_workers():
    strategy = InlineStrategy(workers=100)
    many = ClusterCoordinator(strategy)
    many._queue = _CountingQueue()
    assert many.schedule(double, (1,)).fetch() == 2
    many.join()
    assert many._queue.asked < 50
    many.close()


@pytest.mark.parametrize("ask", ["join", "done", "schedule"])
def test_an_error_is_raised_once_by_whatever_comes_first(coordinator, ask):
    failed = coordinator.schedule(fail)
    with pytest.raises(ValueError, match="boom"):
        failed.fetch()
    with pytest.raises(ValueError, match=r"(?s)boom.*`fail` on worker \d .*raised ValueError.*Traceback"):
        coordinator.schedule(double, (1,)) if ask == "schedule" else getattr(coordinator, ask)()
    coordinator.join()
    assert coordinator.done()


@pytest.mark.slow
def test_an_error_cancels_what_waits_and_is_raised_when_nothing_runs(coordinator):
    running = coordinator.schedule(wait_for_gate, ("running",))
    failed = coordinator.schedule(fail)
    with pytest.raises(ValueError, match="boom"):
        failed.fetch()
    threading.Timer(0.3, gate.set).start()
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    assert seen == ["running"] and running.fetch() == "running"


def test_what_was_cancelled_says_to_schedule_it_again(coordinator):
    blocked = [coordinator.schedule(wait_for_gate) for _ in range(2)]
    failed, waiting = coordinator.schedule(fail), [coordinator.schedule(double, (1,)) for _ in range(3)]
    gate.set()
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    del blocked, failed
    cancelled = [value for value in waiting if value._future.cancelled()]
    for value in cancelled:
        with pytest.raises(concurrent.futures.CancelledError, match="Schedule it again"):
            value.fetch()


def test_of_several_errors_one_is_raised(coordinator):
    for number in range(2):
        coordinator.schedule(fail, (f"boom {number}",))
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    coordinator.join()


def exits():
    raise SystemExit(3)


class _OwnError(Exception):
    def __init__(self, code, other):
        super().__init__(f"code {code}")
        self.other = other


def raises_own_error():
    raise _OwnError(7, threading.Lock())


@pytest.mark.parametrize(("function", "message"), [
    (exits, r"SystemExit: 3"),
    (raises_own_error, r"_OwnError: code 7"),
    (threading.Lock, r"cannot pickle"),
])
def test_what_ends_or_cannot_travel_is_an_error_and_no_lost_worker(coordinator, function, message):
    coordinator.schedule(function)
    with pytest.raises((RuntimeError, TypeError), match=message):
        coordinator.join()
    assert coordinator.strategy.started == [0, 1]


def is_first_run():
    seen.append("run")
    if len(seen) == 1:
        lose_current()
    return len(seen)


def test_a_function_whose_worker_is_lost_runs_again_before_all_others(coordinator):
    with pytest.warns(UserWarning, match=r"worker \d .* has ended.*`is_first_run` is run again"):
        assert coordinator.schedule(is_first_run).fetch() == 2
    coordinator.join()
    until(lambda: len(coordinator.strategy.started) == 3)


@pytest.mark.filterwarnings("ignore:worker:UserWarning")
def test_a_function_that_ends_every_worker_is_an_error(coordinator):
    coordinator.schedule(lose_current)
    with pytest.raises(WorkerLostError, match=r"`lose_current` has ended 3 workers.*The last: worker"):
        coordinator.join()
    assert coordinator.schedule(double, (1,)).fetch() == 2


@pytest.mark.filterwarnings("ignore:worker:UserWarning")
def test_workers_that_cannot_be_replaced_are_an_error():
    strategy = InlineStrategy(workers=1)
    made = ClusterCoordinator(strategy)

    def refuse(index):
        raise module.ProcessLostError(f"worker {index} has ended (exit code 1).")

    made._replace = refuse
    made.schedule(lose_current)
    until(lambda: made._error is not None)
    with pytest.raises(WorkerLostError, match=r"No worker is left.*cannot be started again.*exit code 1"):
        made.done()
    made.close()


def test_a_closed_coordinator_takes_nothing_more(coordinator):
    coordinator.close()
    with pytest.raises(RuntimeError, match="inside of its `with` block"):
        coordinator.schedule(double, (1,))


def test_a_function_is_the_same_object_in_each_call(coordinator):
    base = np.ones(3)

    def identity():
        return id(identity), base.sum()

    strategy = InlineStrategy(workers=1)
    one = ClusterCoordinator(strategy)
    first, second = one.fetch([one.schedule(identity), one.schedule(identity)])
    assert first == second
    base[0] = 5.0
    assert one.schedule(identity).fetch()[1] == 7.0, "a closure over other values is another function"
    one.close()


def test_a_worker_forgets_the_functions_of_long_ago(coordinator, monkeypatch):
    monkeypatch.setattr(module, "MAX_HELD", 4)
    one = ClusterCoordinator(InlineStrategy(workers=1))
    for number in range(12):
        assert one.schedule(lambda number=number: number).fetch() == number
    assert len(one._slots[0].sent) <= 5 and len(one._resources) <= 4
    one.close()


# --- per-worker datasets -----------------------------------------------------------------------------------------


def take(iterator):
    return next(iterator)


def test_each_worker_has_an_iterator_of_its_own_and_iter_begins_anew(coordinator):
    dataset = coordinator.create_per_worker_dataset(lambda: iter(range(100)))
    for _ in range(2):
        iterator = iter(dataset)
        values = coordinator.fetch([coordinator.schedule(take, (iterator,)) for _ in range(10)])
        assert 0 in values and max(values) < 10
        assert all(values.count(value) <= 2 for value in values), "two workers"


def test_a_dataset_itself_is_taken_too(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset([7, 8]))
    assert coordinator.schedule(take, (iterator,)).fetch() == 7


def test_a_per_worker_iterator_is_read_in_functions_only(coordinator):
    with pytest.raises(RuntimeError, match="only readable inside of a scheduled function"):
        next(iter(coordinator.create_per_worker_dataset(lambda: [1])))


def test_the_error_of_a_dataset_is_that_of_a_function_that_reads_it(coordinator):
    def broken():
        raise OSError("no such folder")

    iterator = iter(coordinator.create_per_worker_dataset(broken))
    assert coordinator.schedule(lambda iterator: 1, (iterator,)).fetch() == 1, "it is not read"
    coordinator.schedule(take, (iterator,))
    with pytest.raises(RuntimeError, match=r"dataset of this worker could not be made: OSError: no such folder"):
        coordinator.join()


def test_data_that_have_run_out_are_an_error(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    for _ in range(3):
        coordinator.schedule(take, (iterator,))
    with pytest.raises(RuntimeError, match="has no more batches"):
        coordinator.join()


def test_an_iterator_survives_the_error_of_a_function():
    one = ClusterCoordinator(InlineStrategy(workers=1))
    iterator = iter(one.create_per_worker_dataset(lambda: iter(range(10))))

    def take_and_fail(iterator):
        raise ValueError(f"after {next(iterator)}")

    one.schedule(take_and_fail, (iterator,))
    with pytest.raises(ValueError, match="after 0"):
        one.join()
    assert one.schedule(take, (iterator,)).fetch() == 1
    one.close()


class Silent(Exception):
    def __str__(self):
        raise AttributeError("broken")


def several():
    raise ExceptionGroup("several", [ValueError("one of them")])


def silent():
    raise Silent


def ends_an_iteration():
    raise StopIteration("its value")


def ends_an_asynchronous_iteration():
    raise StopAsyncIteration


@pytest.mark.parametrize(("function", "message"), [
    (several, "ExceptionGroup: several"), (silent, "Silent: .no message"),
    (ends_an_iteration, "(?s)^StopIteration: its value.*`ends_an_iteration` on worker .* raised StopIteration"),
    (ends_an_asynchronous_iteration, "StopAsyncIteration: "),
])
def test_errors_that_are_more_or_less_than_a_message_come_back(coordinator, function, message):
    value = coordinator.schedule(function)
    with pytest.raises(RuntimeError, match=message):
        value._future.result(GUARD_SECS)


def test_a_function_that_ends_an_iteration_does_not_end_that_of_its_results(coordinator):
    values = [coordinator.schedule(double, (1,)), coordinator.schedule(ends_an_iteration)]
    with pytest.raises(RuntimeError, match="StopIteration: its value"):
        list(map(coordinator.fetch, values))
    with pytest.raises(RuntimeError, match="StopIteration: its value"):
        coordinator.join()


def fails_to_be_read(value):
    raise ModuleNotFoundError(f"No module named {value!r}")


class OnlyOfItsWorker:
    def __reduce__(self):
        return fails_to_be_read, ("of_the_worker",)


def test_a_result_that_cannot_be_read_names_its_function_and_worker(coordinator):
    value = coordinator.schedule(OnlyOfItsWorker)
    message = (r"`OnlyOfItsWorker` on worker \d.* has returned a value that the chief cannot read: "
               "ModuleNotFoundError: No module named 'of_the_worker'. Return arrays and plain values")
    with pytest.raises(TypeError, match=message):
        value.fetch()
    with pytest.raises(TypeError, match=message):
        coordinator.join()
    assert coordinator.strategy.started == [0, 1]


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_leaves_nobody_waiting(coordinator):
    value = coordinator.schedule(lose_current)
    with pytest.raises(UserWarning, match="run again by another worker"):
        value._future.result(GUARD_SECS)


def test_workers_forget_an_iterator_that_the_chief_has_let_go_of(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(range(9))))
    coordinator.schedule(next, (iterator,)).fetch()
    key = iterator.__as_resource__().key
    coordinator.join()
    del iterator
    gc.collect()  # the pickler that sent it, too
    for _ in range(20):
        coordinator.schedule(double, (1,)).fetch()
    slots = [slot for slot in coordinator._slots if not slot.released]
    assert slots and key not in coordinator._resources
    assert not any(key in slot.sent or key in slot.handle._host._served._built for slot in slots)


@pytest.mark.parametrize("make", [
    lambda coordinator: coordinator, lambda coordinator: coordinator.schedule(double, (1,))], ids=["itself", "value"])
def test_what_only_the_chief_has_is_refused_in_a_function(coordinator, make):
    held = make(coordinator)
    with pytest.raises(TypeError, match=r"of the chief|Use what `fetch` returns"):
        coordinator.schedule(lambda: held)
