"""The order of many rows: the numbers that any seed has always had, drawn by a thread before they are needed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.networks import classification, compiled_mlp
from trainer.data import Dataset
from trainer.data.reader import Reader
from trainer.data.sources import dataset as datasets
from trainer.data.sources.dataset import DatasetSource, Order, Shuffle


def numbers_of(steps, pass_index, length):
    return np.concatenate([found for _, found in steps.locate(pass_index, np.arange(length))])


@pytest.fixture
def drawn(monkeypatch):
    """Makes any number of rows many; returns a list of which passes were drawn, and whether by the main thread."""
    found, permutation = [], Shuffle._permutation
    monkeypatch.setattr(datasets, "_MANY", 1)

    def permuted(self, pass_index):
        found.append((pass_index, threading.current_thread() is threading.main_thread()))
        return permutation(self, pass_index)

    monkeypatch.setattr(Shuffle, "_permutation", permuted)
    return found


@pytest.mark.parametrize("length", [1, 2, 1000, 2**20 + 3])
def test_an_order_is_the_permutation_that_the_seed_and_the_pass_give_and_takes_32_bits(length):
    shuffle = Shuffle(length, 3)
    for pass_index in (0, 7):
        expected = np.random.default_rng([3, pass_index]).permutation(length)
        found = numbers_of(shuffle, pass_index, length)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.int64 and shuffle._last[1].dtype == np.int32


def test_numbers_that_need_64_bits_have_them(monkeypatch):
    monkeypatch.setattr(datasets.np, "iinfo", lambda dtype: type("Info", (), {"max": 9}))
    assert Shuffle(10, 0)._permutation(0).dtype == np.int64
    assert Shuffle(9, 0)._permutation(0).dtype == np.int32


def test_a_prepared_order_is_drawn_once_by_a_thread(drawn):
    shuffle, expected = Shuffle(100, 1), numbers_of(Shuffle(100, 1), 4, 100)
    drawn.clear()
    for _ in range(2):
        shuffle.draw_ahead(4, 0)
    np.testing.assert_array_equal(numbers_of(shuffle, 4, 100), expected)
    shuffle.draw_ahead(4, 0)
    assert drawn == [(4, False)]


def test_few_rows_need_no_thread(monkeypatch):
    monkeypatch.setattr(threading, "Thread", lambda **options: pytest.fail("it takes no time"))
    Shuffle(1000, 1).draw_ahead(4, 0)


def test_what_a_thread_could_not_draw_is_an_error_where_it_is_needed(monkeypatch, drawn):
    def fails(self, pass_index):
        raise MemoryError("no room for the order")

    monkeypatch.setattr(Shuffle, "_permutation", fails)
    shuffle = Shuffle(100, 1)
    shuffle.draw_ahead(4, 0)
    with pytest.raises(MemoryError, match="no room"):
        shuffle.locate(4, np.arange(3))


@pytest.mark.parametrize(("change", "pass_index", "position", "expected"), [
    (lambda rows: rows.shuffle(1).take(30), 5, 10, 5), (lambda rows: rows.shuffle(1).repeat(3), 2, 250, 8),
    (lambda rows: rows.repeat(2).shuffle(1), 2, 150, 2), (lambda rows: rows.shuffle(1).repeat(None), 0, 750, 7)])
def test_the_pass_that_a_position_comes_from_is_prepared(change, pass_index, position, expected, drawn):
    steps = change(Order(100))
    steps.draw_ahead(pass_index, position)
    steps.locate(pass_index, np.arange(position, position + 1))
    assert drawn == [(expected, False)]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("options", [{"data_on_device": True}, {"data_on_device": False}], ids=str)
def test_fit_draws_the_order_of_each_epoch_during_the_one_before(options, drawn, monkeypatch):
    x, y, _ = classification(64)
    weights = []
    for many in (1, 2**20):
        monkeypatch.setattr(datasets, "_MANY", many)
        drawn.clear()
        model = compiled_mlp(1, **options)
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        weights.append(model.get_weights())
        assert drawn == [(0, True), (1, many > 1), (2, many > 1)]
    for threaded, alone in zip(*weights, strict=True):
        np.testing.assert_array_equal(threaded, alone)


def test_an_epoch_that_begins_in_the_middle_of_a_pass_prepares_the_pass_of_its_start(drawn):
    dataset = Dataset.from_arrays(np.arange(40)).shuffle(2).repeat().batch(10)
    reader = Reader(DatasetSource(dataset), steps_per_epoch=3)
    for epoch in range(4):
        reader.draw_ahead(epoch + 1)
        list(reader.read(epoch))
    assert drawn == [(number, False) for number in range(4)]
