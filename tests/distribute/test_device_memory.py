"""One budget for all arrays that are kept on a device, and what happens where its memory runs out."""

from __future__ import annotations

import types
import weakref

import jax
import numpy as np
import pytest

import trainer
from tests.support.networks import classification, compiled_mlp, mirrored
from trainer.data import Dataset
from trainer.data.sources.arrays import HostArrays
from trainer.distribute.placement import device_memory, devices, placement
from trainer.distribute.strategies import strategy
from trainer.engine.step import compiled_phase

NBYTES = 4 * 1024  # of the arrays of these tests
OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


@pytest.fixture(autouse=True)
def only_arrays_of_the_test(monkeypatch):
    monkeypatch.setattr(placement, "_shared_length", lambda rows, size: rows)
    device_memory.let_go_of_unused()
    monkeypatch.setattr(device_memory, "_kept", weakref.WeakSet())  # an earlier case may still use some


@pytest.fixture
def room_for_two(monkeypatch):
    """Makes the budget of each device that of two of these tests' arrays."""
    for module in (strategy, device_memory):
        monkeypatch.setattr(module, "memory_bytes", lambda device: 2 * NBYTES / device_memory.KEPT_FRACTION)


def arrays_of(value):
    return HostArrays(np.full((64, 16), value, np.float32))


def on_device(index=0):
    return trainer.distribute.OneDeviceStrategy(f"cpu:{index}")


def live(value):
    """Returns how many arrays of these tests on devices have a value."""
    return sum(array.shape == (64, 16) and float(array[0, 0]) == value for array in jax.live_arrays())


@pytest.mark.slow
@pytest.mark.usefixtures("room_for_two")
def test_the_budget_is_one_for_all_strategies_and_datasets():
    strategies, arrays = [on_device() for _ in range(5)], [arrays_of(value) for value in range(5)]
    for each, its_arrays in zip(strategies, arrays, strict=True):
        assert each.place_arrays(its_arrays) is not None
    assert [live(value) for value in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("room_for_two")
def test_what_was_used_longest_ago_is_let_go_of_and_placed_again_when_it_is_used():
    under, arrays = on_device(), [arrays_of(value) for value in range(3)]
    kept = [Dataset.from_arrays(np.array(each.tree)).arrays for each in arrays]
    for number in (0, 1, 0, 2):
        under.place_arrays(kept[number])
    assert [live(value) for value in range(3)] == [1, 0, 1]
    np.testing.assert_array_equal(under.cached_arrays(kept[1]), arrays[1].tree)
    assert [live(value) for value in range(3)] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("room_for_two")
def test_what_is_in_use_stays_and_is_still_known():
    strategies, arrays = [on_device() for _ in range(4)], [arrays_of(value) for value in range(4)]
    used = strategies[0].place_arrays(arrays[0])
    for each, its_arrays in zip(strategies[1:], arrays[1:], strict=True):
        each.place_arrays(its_arrays)
    assert [live(value) for value in range(4)] == [1, 0, 0, 1]
    assert strategies[0].place_arrays(arrays[0]) is used


@pytest.mark.slow
@pytest.mark.usefixtures("room_for_two")
def test_each_device_has_a_budget_of_its_own():
    others, mine = on_device(1), [on_device() for _ in range(4)]
    first = arrays_of(7)
    others.place_arrays(first)
    arrays = [arrays_of(value) for value in range(4)]
    for each, its_arrays in zip(mine, arrays, strict=True):
        each.place_arrays(its_arrays)
    assert live(7) == 1
    both = [mirrored(2) for _ in range(2)]
    more = [arrays_of(value) for value in (8, 9)]
    for each, its_arrays in zip(both, more, strict=True):
        each.place_arrays(its_arrays)
    assert [live(value) for value in (0, 1, 2, 3, 7, 8, 9)] == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.slow
def test_the_memory_of_a_device_is_what_it_says_and_never_the_hosts():
    def device(stats):
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    assert devices.memory_bytes(device({"bytes_limit": 123, "bytes_in_use": 5})) == 123
    assert devices.memory_bytes(device({"bytes_in_use": 5})) == devices.memory_bytes(device(None)) == 0


@pytest.mark.slow
def test_on_devices_that_do_not_say_how_much_they_have_only_what_is_forced_is_kept(monkeypatch):
    for module in (strategy, device_memory):
        monkeypatch.setattr(module, "memory_bytes", lambda device: 0)
    under, arrays = mirrored(2), arrays_of(1)
    assert under.place_arrays(arrays) is None
    np.testing.assert_array_equal(under.place_arrays(arrays, forced=True), arrays.tree)


@pytest.mark.slow
def test_processes_agree_on_the_least_memory(monkeypatch):
    monkeypatch.setattr(strategy, "memory_bytes", lambda device: 8 * NBYTES)
    small, arrays = mirrored(1), arrays_of(1)
    assert mirrored(1).place_arrays(arrays) is not None
    monkeypatch.setattr(small, "process_group", types.SimpleNamespace(
        all_gather=lambda text, what: [text, str(8 * NBYTES - 8)]))
    assert small.place_arrays(arrays) is None


@pytest.fixture
def failing(monkeypatch):
    """Returns a function that lets an execution fail so many times, of those that follow; it counts all."""
    left, counts = [0], []
    compile_lowered = compiled_phase.compile_lowered

    def compiled(lowered, options):
        execute = compile_lowered(lowered, options)

        def run(state, *rest):
            counts.append(1)
            if left[0]:
                left[0] -= 1
                if left[0] >= 10:  # it has taken over the state
                    jax.tree.map(lambda leaf: leaf.delete(), state)
                raise OUT_OF_MEMORY
            return execute(state, *rest)

        return run

    monkeypatch.setattr(compiled_phase, "compile_lowered", compiled)

    def fail(times):
        left[0] = times
        counts.clear()
        return counts

    return fail


def fitted(model):
    x, y, _ = classification(64)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("times", [0, 1])
def test_an_execution_without_memory_runs_again_without_what_is_only_kept(failing, times):
    under, kept = on_device(), arrays_of(7)
    under.place_arrays(kept)
    expected = fitted(compiled_mlp(2))
    failing(times)
    for mine, theirs in zip(fitted(compiled_mlp(2)), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert live(7) == 1 - times


@pytest.mark.slow
def test_an_execution_that_fails_again_says_what_there_is_to_do_and_the_model_goes_on(failing):
    model, expected = compiled_mlp(2), fitted(compiled_mlp(2))
    counts = failing(2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="9 bytes") as raised:
        fitted(model)
    assert len(counts) == 2
    notes = "".join(raised.value.__notes__)
    assert all(word in notes for word in ("batch_size", "microbatches", "data_on_device=False", "MEM_FRACTION"))
    assert "which are gone" not in notes
    for mine, theirs in zip(fitted(model), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_an_execution_that_has_taken_over_the_state_is_not_run_again(failing):
    counts = failing(11)
    with pytest.raises(jax.errors.JaxRuntimeError, match="9 bytes") as raised:
        fitted(compiled_mlp(2))
    assert len(counts) == 1
    assert "the model's state, which are gone. Load weights or a checkpoint" in "".join(raised.value.__notes__)


@pytest.mark.slow
def test_other_errors_are_raised_at_once():
    calls = []

    def fails():
        calls.append(1)
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        placement.retried(fails)
    assert len(calls) == 1


@pytest.mark.slow
def test_a_placement_without_memory_is_made_again(monkeypatch):
    device_put, failures = jax.device_put, [OUT_OF_MEMORY]

    def put(*arguments):
        if failures:
            raise failures.pop()
        return device_put(*arguments)

    under, kept, arrays = on_device(), arrays_of(7), arrays_of(1)
    under.place_arrays(kept)
    monkeypatch.setattr(jax, "device_put", put)
    np.testing.assert_array_equal(under.place_arrays(arrays), arrays.tree)
    assert not failures and live(7) == 0
