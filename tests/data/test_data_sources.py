"""The sources and the `Reader`: every kind of data, what an epoch is, and how batches are grouped."""

import concurrent.futures
import itertools
import math
import sys
import threading

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.feeds import (
    FEEDS,
    ROWS,
    EmptyLoader,
    EndlessPyDataset,
    FakeTfDataset,
    Indexed,
    ReIterable,
    X,
    column,
    grain_map,
    pairs,
    rows_of,
)
from tests.support.waiting import GUARD_SECS
from trainer.data import Dataset
from trainer.data.adapt import adapt
from trainer.data.prefetch import prefetch
from trainer.data.reader import Reader
from trainer.data.sources.arrays import as_batch


def batches_of(source, epoch=0, **options):
    """Returns the row numbers of each batch of an epoch, after unstacking the groups."""
    with Reader(source, **options) as reader:
        return [rows for group in reader.read(epoch) for rows in rows_of(group)]


@pytest.mark.parametrize(("build", "num_batches", "expected"), FEEDS.values(), ids=FEEDS)
def test_every_kind_of_data_gives_its_batches_in_order(build, num_batches, expected):
    source = build()
    assert source.num_batches == num_batches
    assert [column(as_batch(element)) for element in source.read(0)] == expected
    for group_size in (1, 2, 5):
        assert batches_of(build(), group_size=group_size) == expected
    if not source.is_one_shot:
        assert [column(as_batch(element)) for element in source.read(1, 1)] == expected[1:]


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in FEEDS if name != "generator"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_per_epoch_cuts_each_pass_and_any_epoch_can_come_first(name, steps):
    build, num_batches, expected = FEEDS[name]
    epochs = [expected[start:start + steps] for start in range(0, 3, steps)] * 4
    with Reader(build(), steps, group_size=3) as reader:
        assert reader.num_batches == min(steps, num_batches or steps)
        for epoch, batches in enumerate(epochs):
            assert [rows for group in reader.read(epoch) for rows in rows_of(group)] == batches
    for first in range(1, 4):
        with Reader(build(), steps) as reader:
            assert [rows for group in reader.read(first) for rows in rows_of(group)] == epochs[first]
    with Reader(build(), steps) as reader:
        groups = list(reader.read(1, start=1))
        assert [rows for group in groups for rows in rows_of(group)] == epochs[1][1:]
        assert [group.first for group in groups] == list(range(1, len(epochs[1])))


@pytest.mark.parametrize("name", ["arrays", "mapped dataset", "re-iterable", "indexed", "grain iter dataset"])
def test_an_epoch_that_ends_with_its_pass_warns_and_one_that_ends_as_it_should_does_not(name):
    build, _, expected = FEEDS[name]
    with Reader(build(), 2) as reader:
        list(reader.read(0))
        with pytest.warns(UserWarning, match=r"out of data after 1 of the 2 batches.*`trainer\.data\.Dataset.*repeat"):
            list(reader.read(1))
    for steps in (1, 3):
        with Reader(build(), steps) as reader:
            assert [rows for epoch in range(6) for group in reader.read(epoch) for rows in rows_of(group)] == (
                expected * 6)[:6 * steps]


def test_passes_of_other_lengths_than_the_data_say_are_read_to_their_ends():
    class Wrong(ReIterable):
        def __len__(self):
            return 5

    with pytest.warns(UserWarning, match="1 of the 2 batches"), Reader(adapt(Wrong()), 2) as reader:
        found = [[rows[0] for group in reader.read(epoch) for rows in rows_of(group)] for epoch in range(4)]
    assert found == [[0, 4], [8], [0, 4], [8]]


def test_an_indexed_object_is_told_the_end_of_each_epoch():
    data = Indexed()
    with Reader(adapt(data), 1) as reader:
        for epoch in range(4):
            list(reader.read(epoch))
            assert data.epochs_ended == epoch + 1


def test_shuffled_arrays_read_the_same_passes_with_and_without_steps_per_epoch():
    by_pass = [batches_of(adapt(X, batch_size=4, shuffle=True, seed=7), epoch) for epoch in range(3)]
    with Reader(adapt(X, batch_size=4, shuffle=True, seed=7), steps_per_epoch=3) as reader:
        assert [[r for g in reader.read(epoch) for r in rows_of(g)] for epoch in range(3)] == by_pass
    mapped = adapt(Dataset.from_arrays(X).shuffle(7).batch(4).map(lambda x: x))
    with Reader(mapped, steps_per_epoch=3) as reader:
        assert [[r for g in reader.read(epoch) for r in rows_of(g)] for epoch in range(3)] == by_pass
    assert by_pass[0] != by_pass[1]


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12), group=st.integers(1, 5), data=st.data())
def test_groups_of_an_iterable_keep_every_batch_and_are_as_large_as_they_can_be(sizes, group, data):
    values = [np.full((rows, 1), number, np.float32) for number, rows in enumerate(sizes)]
    start = data.draw(st.integers(0, len(sizes) - 1))
    with Reader(adapt(map(np.copy, values)), group_size=group) as reader:
        groups = list(reader.read(0, start))
    numbers = [int(batch[0, 0]) for found in groups for batch in found.data[:found.count]]
    assert numbers == list(range(start, len(sizes)))
    assert [found.rows for found in groups for _ in range(found.count)] == sizes[start:]
    for found, following in itertools.pairwise(groups):
        assert found.count <= group
        assert found.count == group or found.rows != following.rows


def test_a_pipeline_that_reuses_its_buffer_does_not_change_batches_already_read():
    def reuses():
        buffer = np.empty((2, 1), np.float32)
        for number in range(5):
            buffer[:] = number
            yield buffer

    groups = list(Reader(adapt(reuses()), group_size=3).read(0))
    assert [group.data[:group.count, 0, 0].tolist() for group in groups] == [[0, 1, 2], [3, 4]]


def test_a_group_that_somebody_waits_for_ends_with_the_next_batch():
    urgent = iter([False, True, False, False, True, True, False])
    groups = list(Reader(adapt(pairs(7)), group_size=4).read(0, is_urgent=lambda: next(urgent)))
    assert [group.count for group in groups] == [2, 3, 1, 1]
    assert [rows for group in groups for rows in rows_of(group)] == [column(batch) for batch in pairs(7)]


@pytest.mark.parametrize(("rows", "group_size"), [(33, 1), (33, 64), (3200, 1)])
def test_few_row_numbers_are_found_in_vain(monkeypatch, rows, group_size):
    found, real = [], Dataset.index_block
    monkeypatch.setattr(Dataset, "index_block", lambda self, pass_index, start, stop: (
        found.append(stop - start) or real(self, pass_index, start, stop)))
    endless = Dataset.from_arrays(np.arange(rows)).batch(32).repeat()
    reader = Reader(adapt(endless), steps_per_epoch=400, group_size=group_size)
    groups = list(reader.read(0))
    assert sum(group.count for group in groups) == 400
    assert sum(found) <= 2 * 400 + len(groups) * (group_size - 1)
    assert len(found) <= (15 if rows == 3200 else 400), "numbers of several small groups are found at once"


def test_all_groups_of_a_run_have_the_same_room_whatever_their_count():
    for length, capacity in ((1, 2), (3, 4), (10, 8), (40, 8)):
        groups = list(Reader(adapt(np.zeros((length, 2**17)), batch_size=1), group_size=8).read(0))
        assert {group.data.shape for group in groups} == {(capacity, 1, 2**17)}
        groups = list(Reader(adapt(np.zeros((length, 1)), batch_size=1), group_size=8).read(0))
        assert {group.data.shape for group in groups} == {(8, 1, 1)}
    assert next(Reader(adapt(pairs()), group_size=8).read(0)).data[0].shape[0] == 8


def test_group_size_may_change_between_epochs():
    reader = Reader(adapt(X, batch_size=2))
    assert [group.count for group in reader.read(0)] == [1] * 5
    reader.group_size = 4
    assert [(group.count, group.first) for group in reader.read(1)] == [(4, 0), (1, 4)]


class HalfWay:
    """A re-iterable whose iterator has a state, which is that of half a batch while the batch is being made."""

    def __init__(self):
        self.is_making, self.may_go_on = threading.Event(), threading.Event()

    def __iter__(self):
        return HalfWayIterator(self)


class HalfWayIterator:
    def __init__(self, data):
        self.data, self.rows = data, 0

    def __next__(self):
        if self.rows == 4:
            raise StopIteration
        self.rows += 1
        if self.rows == 3:
            self.data.is_making.set()
            self.data.may_go_on.wait(GUARD_SECS)
        self.rows += 1
        return X[self.rows - 2:self.rows]

    def __iter__(self):
        return self

    def get_state(self):
        return {"rows": self.rows}

    def set_state(self, state):
        self.rows = state["rows"]


@pytest.mark.slow
def test_no_position_is_taken_from_an_iterator_that_is_making_a_batch():
    data = HalfWay()
    reader = Reader(adapt(data))
    reader.keeps_resume_tokens = True
    groups = reader.read(1)
    first = next(groups)
    assert (first.count, first.resume_token) == (1, None)  # a pass that was just opened has no state yet
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(next, groups)
        assert data.is_making.wait(GUARD_SECS)
        position = reader.position(1, 1, first.resume_token)
        data.may_go_on.set()
        assert rows_of(second.result()) == [[2, 3]]
    with Reader(adapt(HalfWay())) as resumed:
        resumed.peek()
        resumed.resume(1, 1, position)
        assert [rows for group in resumed.read(1, 1) for rows in rows_of(group)] == [[2, 3]]


@pytest.mark.parametrize("name", FEEDS)
def test_peek_gives_a_copy_of_the_first_batch_without_losing_it(name):
    build, _, expected = FEEDS[name]
    with Reader(build()) as reader:
        for _ in range(2):
            batch = reader.peek()
            assert column(batch) == expected[0]
            (batch[0] if isinstance(batch, tuple) else batch)[:] = -1
        assert [rows for group in reader.read(0) for rows in rows_of(group)] == expected


def test_peeking_opens_a_re_iterable_once_and_every_pass_is_closed():
    data = ReIterable()
    with Reader(adapt(data)) as reader:
        reader.peek()
        list(reader.read(0))
        assert (data.opened, data.closed) == (1, 1)
        epoch = reader.read(1)
        next(epoch)
        epoch.close()
        assert (data.opened, data.closed) == (2, 2)
    with Reader(adapt(data), steps_per_epoch=1) as reader:
        list(reader.read(0))
        list(reader.read(1))
        assert (data.opened, data.closed) == (3, 2)
    assert data.closed == 3


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in FEEDS if name != "generator"])
@pytest.mark.parametrize("steps", [None, 2, 4])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_reading_epoch_0_again_starts_from_the_first_batch(name, steps):
    build, _, expected = FEEDS[name]
    with Reader(build(), steps) as reader:
        for _ in range(3):
            reader.peek()
            assert [r for g in reader.read(0) for r in rows_of(g)] == expected[:steps]
        abandoned = reader.read(0)
        next(abandoned)
        abandoned.close()
        assert column(reader.peek()) == expected[0]
        assert rows_of(next(reader.read(0))) == expected[:1]


def test_reading_epoch_0_again_opens_a_re_iterable_once_each_time():
    data = ReIterable()
    with Reader(adapt(data), steps_per_epoch=3) as reader:
        for times in (1, 2, 3):
            reader.peek()
            list(reader.read(0))
            assert data.opened == times
    assert data.closed == 3


def test_an_abandoned_epoch_does_not_close_the_next_one():
    with Reader(adapt(ReIterable())) as reader:
        abandoned = reader.read(0)
        next(abandoned)
        following = reader.read(1)
        next(following)
        abandoned.close()
        assert len(list(following)) == 2


def test_closing_a_prefetcher_runs_the_pipelines_finally_blocks():
    data = ReIterable(count=1000)
    with prefetch(Reader(adapt(data)).read(0), lambda group: group) as ready:
        next(ready)
    assert (data.opened, data.closed) == (1, 1)


def test_a_one_shot_iterator_continues_over_epochs_and_stays_the_users():
    generator = pairs(5)
    reader = Reader(adapt(generator), steps_per_epoch=2)
    firsts = [[rows[0] for group in reader.read(epoch) for rows in rows_of(group)] for epoch in range(2)]
    assert firsts == [[0, 4], [8, 12]]
    reader.close()
    assert next(generator)[1].tolist() == [16, 17, 18, 19]


def test_a_one_shot_iterator_that_runs_out_warns_and_ends_the_epoch():
    reader = Reader(adapt(pairs(3)), steps_per_epoch=2)
    list(reader.read(0))
    assert not reader.exhausted
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        assert [group.first for group in reader.read(1)] == [0]
    assert reader.exhausted


def test_a_one_shot_iterator_without_steps_has_one_epoch():
    reader = Reader(adapt(pairs(3)))
    assert reader.num_batches is None
    assert len(list(reader.read(0))) == 3
    assert not reader.exhausted
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        assert list(reader.read(1)) == []
    assert reader.exhausted


def test_a_one_shot_iterator_that_ends_with_an_epoch_has_run_out_before_the_next():
    reader = Reader(adapt(pairs(4)), steps_per_epoch=2)
    for epoch in range(2):
        assert not reader.check_exhausted()
        assert sum(group.count for group in reader.read(epoch)) == 2
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        assert reader.check_exhausted()
    assert reader.exhausted
    with pytest.raises(ValueError, match="no batch left after the 4 that were read"):
        reader.peek()


def test_data_that_start_anew_never_run_out():
    with Reader(adapt(ReIterable())) as reader:
        list(reader.read(0))
        assert not reader.check_exhausted()


def test_a_fresh_one_shot_iterator_is_forwarded_to_where_a_run_resumes():
    (group,) = Reader(adapt(pairs(9)), steps_per_epoch=3).read(2, start=2)
    assert group.first == 2
    assert rows_of(group) == [[32, 33, 34, 35]]


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(
    ("data", "word"),
    [(lambda: iter(()), "generator"), (lambda: ReIterable(0), "dataset"), (EmptyLoader, "dataset")],
)
def test_data_that_yield_nothing_are_refused(steps, data, word):
    with pytest.raises(ValueError, match=f"{word} must yield at least one batch"):
        list(Reader(adapt(data()), steps).read(0))
    with pytest.raises(ValueError, match=f"{word} must yield at least one batch"):
        Reader(adapt(data()), steps).peek()


def test_an_indexed_object_is_told_of_each_whole_pass_and_its_batches_are_shuffled():
    items = Indexed()
    passes = [batches_of(adapt(items, shuffle=True, seed=2), epoch) for epoch in range(4)]
    assert items.epochs_ended == 4
    assert all(sorted(batches) == ROWS for batches in passes)
    assert len({str(batches) for batches in passes}) > 1
    assert batches_of(adapt(Indexed(), shuffle=True, seed=2), 1) == passes[1]


@pytest.mark.parametrize(
    "build",
    [lambda: Dataset.from_arrays(X).batch(5).repeat(), EndlessPyDataset, lambda: FakeTfDataset(-1),
     lambda: grain_map().repeat()],
    ids=["dataset", "py dataset", "tf dataset", "grain"],
)
def test_endless_data_need_steps_per_epoch(build):
    source = adapt(build())
    assert source.num_batches == math.inf
    with pytest.raises(ValueError, match="steps_per_epoch"):
        Reader(source)
    with Reader(source, steps_per_epoch=2) as reader:
        assert sum(group.count for group in reader.read(0)) == 2
        assert sum(group.count for group in reader.read(1)) == 2


def test_the_number_of_batches_of_a_tf_dataset_may_be_unknown():
    assert adapt(FakeTfDataset(-2)).num_batches is None


def test_grains_word_for_endless_is_what_adapt_takes_it_for():
    assert len(grain.MapDataset.range(3).repeat()) == sys.maxsize
