"""Memory of batches is used again, but never while anything can still see it."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

from trainer.data.adapt import adapt
from trainer.data.reader import Reader
from trainer.data.sources.arrays import BufferPool, is_aligned


def test_memory_is_used_again_once_no_view_of_it_is_left():
    pool = BufferPool()
    array = pool.empty((4, 8), np.float32)
    address = array.ctypes.data
    row = array[1]
    del array
    other = pool.empty((8, 4), np.int32)
    assert other.ctypes.data != address, "a row of it is still in use"
    del row
    assert pool.empty((16, 2), np.float32).ctypes.data == address


def test_memory_is_aligned_wherever_it_lies():
    arrays = [BufferPool().empty((size,), np.uint8) for size in range(1, 400)]
    assert len({array.ctypes.data for array in arrays}) == len(arrays)
    assert all(map(is_aligned, arrays))


def test_free_memory_is_bounded_and_what_is_of_no_use_makes_room():
    pool = BufferPool()
    pool.kept_bytes = 100
    old, new = pool.empty((80,), np.uint8), pool.empty((60,), np.uint8)
    address = new.ctypes.data
    del old
    del new  # the two would be too much
    assert pool._free_bytes == 60
    assert pool.empty((60,), np.uint8).ctypes.data == address
    huge = pool.empty((101,), np.uint8)
    del huge
    assert pool._free_bytes <= 100


def test_the_next_run_uses_the_memory_of_the_last_one():
    def addresses():
        return {group.data.ctypes.data for group in Reader(adapt(_batches()), group_size=2).read(0)}

    assert addresses() & addresses()


@pytest.mark.slow
def test_memory_that_a_device_works_on_is_not_used_again():
    pool = BufferPool()
    array = pool.empty((64, 64), np.float32)
    array[:] = 1
    address = array.ctypes.data
    placed = jax.device_put(array, jax.devices()[0])
    assert placed.unsafe_buffer_pointer() == address, "JAX uses the memory itself, or this tests nothing"
    del array
    for _ in range(3):
        pool.empty((64, 64), np.float32)[:] = 2
    assert float(placed.min()) == 1
    result = placed + 1  # may still run when the last reference goes
    del placed
    for _ in range(3):
        pool.empty((64, 64), np.float32)[:] = 3
    assert float(result.min()) == float(result.max()) == 2
    gc.collect()


def test_a_reader_needs_no_new_memory_for_each_group():
    reader = Reader(adapt(_batches()), group_size=2)
    addresses, values = set(), []
    for group in reader.read(0):
        addresses.add(group.data.ctypes.data)
        values += group.data[:group.count, 0, 0].tolist()
        del group
    assert values == list(range(12))
    assert len(addresses) <= 2


def test_groups_that_are_kept_stay_as_they_are():
    groups = list(Reader(adapt(_batches()), group_size=2).read(0))
    assert [value for group in groups for value in group.data[:group.count, 0, 0].tolist()] == list(range(12))


def _batches():
    return (np.full((4, 2), number, np.float32) for number in range(12))
