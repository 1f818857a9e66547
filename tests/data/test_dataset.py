"""`Dataset`: the order of its elements, what it copies, and what it refuses."""

import itertools
import math
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import DataError, Dataset, RowDataset
from trainer.data.adapt import adapt
from trainer.data.reader import Reader
from trainer.data.sources.arrays import as_batch
from trainer.data.sources.dataset import DatasetSource

CITIES = np.array(["Rome", "Oslo", "Rome"])
TEXT = Dataset.from_arrays(({"city": CITIES}, np.array(["no", "yes", "no"])))
ROWS = [{"age": 1.0, "city": "Rome", "y": 0.0}, {"age": 2.0, "city": "Oslo", "y": 1.0}]


def rows(dataset, pass_index=0):
    return [element.tolist() for element in dataset.read(pass_index)]


def naive_batches(values, batch_size):
    return [values[start : start + batch_size] for start in range(0, len(values), batch_size)]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda d: d, [0, 1, 2, 3, 4]),
        (lambda d: d.batch(2), [[0, 1], [2, 3], [4]]),
        (lambda d: d.batch(2, drop_remainder=True), [[0, 1], [2, 3]]),
        (lambda d: d.batch(5), [[0, 1, 2, 3, 4]]),
        (lambda d: d.take(3).batch(2), [[0, 1], [2]]),
        (lambda d: d.batch(2).take(1), [[0, 1]]),
        (lambda d: d.take(9).batch(3), [[0, 1, 2], [3, 4]]),
        (lambda d: d.repeat(2).batch(4), [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]),
        (lambda d: d.batch(4).repeat(2), [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]]),
        (lambda d: d.repeat().take(7).batch(4), [[0, 1, 2, 3], [4, 0, 1]]),
        (lambda d: d.repeat().batch(4).take(2), [[0, 1, 2, 3], [4, 0, 1, 2]]),
        (lambda d: d.take(2).repeat(2).take(3), [0, 1, 0]),
        (lambda d: d.map(lambda v: v * 2).batch(3), [[0, 2, 4], [6, 8]]),
        (lambda d: d.batch(3).map(lambda v: v * 2), [[0, 2, 4], [6, 8]]),
        (lambda d: d.map(lambda v: v + 1).batch(3).map(lambda v: v * 2), [[2, 4, 6], [8, 10]]),
        (lambda d: d.map(lambda v: v + 1).take(2), [1, 2]),
        (lambda d: d.batch(2).map(lambda v: v[:1]), [[0], [2], [4]]),
    ],
)
def test_elements_are_rows_before_batch_and_batches_after_it(build, expected):
    dataset = build(Dataset.from_arrays(np.arange(5)))
    assert rows(dataset) == expected
    assert len(dataset) == dataset.cardinality == len(expected)


def test_map_unpacks_a_tuple_element_and_passes_a_dict_whole():
    pairs = Dataset.from_arrays((np.arange(4.0), np.arange(4))).batch(4).map(lambda x, y: (x + y, y))
    (batch,) = pairs
    assert batch[0].tolist() == [0, 2, 4, 6]
    named = Dataset.from_arrays({"a": np.arange(4)}).map(lambda row: {"b": row["a"] + 1}).batch(2)
    assert [batch["b"].tolist() for batch in named] == [[1, 2], [3, 4]]


def drawn(dataset, pass_index=0, start=0):
    """Returns the row number and the random number of each row."""
    return [(number, value) for numbers, values in dataset.read(pass_index, start)
            for number, value in zip(numbers.tolist(), values.tolist(), strict=True)]


def test_random_numbers_depend_on_the_seed_the_pass_and_the_row_only():
    def draw(rng, number):
        return number, rng.uniform(size=1).astype(np.float32)[0]

    plain = Dataset.from_arrays(np.arange(10))
    made = {name: drawn(rows.batch(size), 1) for name, rows, size in (
        ("in order", plain.random_map(draw), 4), ("shuffled", plain.random_map(draw).shuffle(3), 3),
        ("shuffled first", plain.shuffle(3).random_map(draw), 5))}
    assert all(sorted(pairs) == made["in order"] for pairs in made.values())
    others = [drawn(plain.random_map(draw).batch(4)), drawn(plain.random_map(draw, seed=1).batch(4), 1)]
    assert not {value for _, value in made["in order"]} & {value for pairs in others for _, value in pairs}
    elsewhere = RowDataset(np.arange(10)).random_map(draw).batch(4)
    assert [value for _, values in elsewhere for value in values.tolist()] == [value for _, value in others[0]]
    assert list(plain.random_map(draw)) == others[0]


def test_a_repetition_has_other_random_numbers_and_each_batch_is_found_without_those_before_it():
    rows = Dataset.from_arrays(np.arange(5)).random_map(lambda rng, number: (number, rng.uniform())).repeat(2)
    assert len({value for _, value in drawn(rows.batch(4))}) == 10
    batches = Dataset.from_arrays(np.arange(6)).batch(2).random_map(
        lambda rng, numbers: (numbers, rng.uniform(size=2))).shuffle(1)
    for dataset, size in ((rows.batch(4), 4), (batches, 2)):
        whole = drawn(dataset, 2)
        assert all(drawn(dataset, 2, start) == whole[start * size:] for start in range(3))


def test_each_pass_and_each_repetition_is_shuffled_differently_and_reproducibly():
    dataset = Dataset.from_arrays(np.arange(50)).shuffle(seed=3)
    passes = [rows(dataset, index) for index in range(3)]
    assert all(sorted(values) == list(range(50)) for values in passes)
    assert len({tuple(values) for values in passes}) == 3
    assert rows(dataset, 1) == passes[1]
    assert rows(Dataset.from_arrays(np.arange(50)).shuffle(seed=4)) != passes[0]
    # Repeating goes through the same passes as reading one after another.
    assert rows(dataset.repeat(3)) == list(itertools.chain(*passes))
    assert list(itertools.islice(dataset.repeat(), 150)) == list(itertools.chain(*passes))
    assert rows(dataset.repeat(2), 1)[:50] == passes[2]
    taken = dataset.repeat().take(60)
    assert rows(taken, 0) != rows(taken, 1)


def test_shuffling_batches_keeps_rows_together():
    values = rows(Dataset.from_arrays(np.arange(41)).batch(3).shuffle(seed=1))
    assert sorted(values) == naive_batches(list(range(41)), 3)
    assert values != sorted(values)


def test_a_shuffle_of_repeated_shuffled_rows_has_every_row_equally_often():
    values = rows(Dataset.from_arrays(np.arange(7)).shuffle(1).repeat(3).shuffle(2))
    assert sorted(values) == sorted(list(range(7)) * 3)


def test_an_endless_dataset_has_infinite_cardinality_and_no_length():
    dataset = Dataset.from_arrays(np.arange(5)).batch(2).repeat()
    assert dataset.cardinality == math.inf
    with pytest.raises(TypeError, match="endless"):
        len(dataset)
    with pytest.raises(ValueError, match="before `repeat`"):
        dataset.shuffle()


def test_iterating_twice_gives_pass_0_both_times():
    dataset = Dataset.from_arrays(np.arange(20)).shuffle().batch(6)
    first, second = ([batch.tolist() for batch in dataset] for _ in range(2))
    assert first == second == rows(dataset, 0)


@settings(max_examples=60)
@given(
    length=st.integers(1, 50), batch=st.integers(1, 20), group=st.integers(1, 5),
    shuffle=st.booleans(), data=st.data(),
)
def test_groups_hold_every_row_once_in_the_order_of_a_naive_loop(length, batch, group, shuffle, data):
    dataset = Dataset.from_arrays((np.arange(length), np.arange(length) * 2.0))
    dataset = dataset.shuffle(5) if shuffle else dataset
    order = np.random.default_rng([5, 2]).permutation(length).tolist() if shuffle else list(range(length))
    expected = naive_batches(order, batch)
    start = data.draw(st.integers(0, len(expected)))
    reader = Reader(DatasetSource(dataset.batch(batch)), group_size=group)
    groups = list(reader.read(2, start))
    batches = [x.tolist() for found in groups for x in found.data[0][:found.count]]
    assert batches == expected[start:]
    assert all(found.count <= group and found.data[0].shape == (group, found.rows) for found in groups)
    assert [found.first for found in groups] == [start + sum(g.count for g in groups[:i]) for i in range(len(groups))]
    assert all((found.data[1] == 2 * found.data[0])[:found.count].all() for found in groups)


@pytest.mark.slow
@settings(max_examples=40)
@given(length=st.integers(1, 30), batch=st.integers(1, 8), times=st.integers(1, 3), seed=st.integers(0, 9))
def test_reading_from_a_start_is_dropping_as_many_elements(length, batch, times, seed):
    base = Dataset.from_arrays(np.arange(length)).shuffle(seed)
    for dataset in (base.repeat(times).batch(batch), base.batch(batch).repeat(times), base.batch(batch).shuffle(1)):
        whole = rows(dataset, 1)
        for start in range(len(whole) + 1):
            assert [element.tolist() for element in dataset.read(1, start)] == whole[start:]


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [("f8", "f4"), ("i8", "i4"), ("u8", "u4"), (">f4", "f4"), ("u1", "u1"), ("?", "?"), ("f2", "f2"), ("c16", "c8"),
     (ml_dtypes.bfloat16, ml_dtypes.bfloat16)],
)
def test_batches_have_the_dtype_that_jax_would_give_them(given_dtype, expected):
    array = np.ones((4, 2)).astype(given_dtype)
    (batch,) = Dataset.from_arrays(array).batch(4)
    assert batch.dtype == np.dtype(expected) == jnp.asarray(array.astype(array.dtype.newbyteorder("="))).dtype
    assert array.dtype == np.dtype(given_dtype)


def test_64_bits_are_kept_when_jax_keeps_them():
    with jax.enable_x64(True):
        (batch,) = Dataset.from_arrays(np.ones(3)).batch(3)
    assert batch.dtype == np.float64


@pytest.mark.parametrize(("wide", "dtype"), [(np.longdouble, np.float32), (np.clongdouble, np.complex64)])
def test_extended_precision_is_cast_and_refused_if_it_overflows(wide, dtype):
    (batch,) = Dataset.from_arrays(np.array([1.5, -2], wide)).batch(2)
    assert batch.dtype == dtype and batch.tolist() == [1.5, -2]
    with pytest.raises(DataError, match="would become infinite"):
        as_batch(np.array([1e300], wide))


def test_integers_that_are_written_later_are_refused_if_they_would_wrap_around():
    x = np.arange(4)
    dataset = Dataset.from_arrays({"ids": x}).batch(2)
    x[3] = 2**32 + 1
    with pytest.raises(DataError, match=r"`x\['ids'\]` must fit into int32"):
        list(Reader(adapt(dataset)).read(0))


@pytest.mark.parametrize("array", [np.arange(12.0).reshape(6, 2), np.asfortranarray(np.arange(12.0).reshape(6, 2)),
                                   np.arange(24.0).reshape(6, 4)[:, ::2], np.arange(6, dtype="f4")])
def test_batches_share_no_memory_with_the_arrays(array):
    before = array.copy()
    for batch in Dataset.from_arrays(array).batch(6):
        np.testing.assert_array_equal(batch, array)
        batch[...] = -1
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("layout", ["C", "F"])
def test_reading_never_copies_a_whole_array(layout):
    array = np.ones((50_000, 20), order=layout)
    reader = Reader(DatasetSource(Dataset.from_arrays(array).shuffle().batch(100)), group_size=4)
    tracemalloc.start()
    try:
        count = sum(group.count for group in reader.read(0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 500
    # The permutation takes 0.4 MB, a group 0.1 MB.
    assert peak < array.nbytes / 5


def test_lists_of_numbers_and_jax_arrays_are_arrays():
    (batch,) = Dataset.from_arrays([[[1, 2], [3, 4]], jnp.ones(2)]).batch(2)
    assert isinstance(batch, tuple)
    np.testing.assert_array_equal(batch[0], [[1, 2], [3, 4]])
    assert isinstance(batch[1], np.ndarray)
    (batch,) = Dataset.from_arrays([1, 2, 3]).batch(3)
    assert batch.tolist() == [1, 2, 3]


@pytest.mark.parametrize("cities", [
    CITIES, CITIES.astype("S4"), CITIES.tolist(), CITIES.astype(object), CITIES.astype(np.dtypes.StringDType())],
    ids=["U", "S", "list", "object", "string"])
def test_text_stays_on_the_host_until_a_map_makes_numbers_of_it(cities):
    dataset = Dataset.from_arrays((cities, np.arange(3))).shuffle(seed=3)
    order = [int(number) for _, number in dataset]
    expected = [len(cities[number]) + (cities[number] == cities[0]) for number in order]
    assert [text for text, _ in dataset] == [cities[number] for number in order]
    for mapped in (dataset.batch(2).map(lambda text, _: np.array([len(each) + (each == cities[0]) for each in text])),
                   dataset.map(lambda text, _: np.int32(len(text) + (text == cities[0]))).batch(2)):
        groups = Reader(adapt(mapped)).read(0)
        assert np.concatenate([group.data[0] for group in groups]).tolist() == expected


def test_missing_text_is_kept():
    (batch,) = Dataset.from_arrays(np.array(["a", None, float("nan")], object)).batch(3)
    assert batch[:2].tolist() == ["a", None] and np.isnan(batch[2])


def test_tensors_are_one_element():
    dataset = Dataset.from_tensors((np.arange(3.0), np.arange(3)))
    assert dataset.cardinality == 1 and [y.tolist() for _, y in dataset.repeat(2)] == [[0, 1, 2], [0, 1, 2]]
    (group,) = Reader(adapt(dataset)).read(0)
    assert (group.count, group.rows) == (1, 3)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Dataset.from_arrays((np.zeros((10, 4)), np.zeros(9))), ["same number of rows", "(10, 4)", "(9,)"]),
        (lambda: Dataset.from_arrays(np.zeros((0, 4))), ["empty", "(0, 4)"]),
        (lambda: Dataset.from_arrays(()), ["empty"]),
        (lambda: Dataset.from_arrays(np.float32(3)), ["scalar"]),
        (lambda: Dataset.from_arrays([[1, 2], [3]]), ["list"]),
        (lambda: Dataset.from_arrays(np.array([object()] * 3)), ["numeric", "object"]),
        (lambda: Dataset.from_arrays(np.array([None] * 3)), ["numeric", "object"]),
        (lambda: Dataset.from_arrays(np.array(["2020-01-01"], "M8[D]")), ["numeric", "datetime64"]),
        (lambda: Dataset.from_arrays(np.array([1], "m8[D]")), ["numeric", "timedelta64"]),
        (lambda: adapt(TEXT.batch(2)), ["`x['city']`", "numeric", "<U4", "`map`"]),
        (lambda: adapt(Dataset.from_columns(ROWS, x=["age", "city"], y="y").batch(2)),
         ["`x[1]` (the column 'city')", "numeric", "<U4", "`map`"]),
        (lambda: adapt(Dataset.from_columns(ROWS, "age", "city").batch(2)), ["`y` (the column 'city')"]),
        (lambda: Reader(adapt(TEXT.batch(2).map(lambda x, y: (x, np.ones(len(y)))))).peek(),
         ["batch 0", "`x['city']`"]),
        (lambda: Dataset.from_arrays(np.zeros(3)).batch(0), ["batch_size", "0"]),
        (lambda: Dataset.from_arrays(np.zeros(3)).batch(2).batch(2), ["already batched"]),
        (lambda: Dataset.from_arrays(np.zeros(3)).batch(4, drop_remainder=True), ["empty", "3", "4"]),
        (lambda: Dataset.from_arrays(np.zeros(3)).repeat(0), ["times", "0"]),
        (lambda: Dataset.from_arrays(np.zeros(3)).take(-1), ["count", "-1"]),
        (lambda: Dataset.from_arrays(np.zeros(3)).shuffle(-1), ["seed", "-1"]),
    ],
)
def test_bad_arguments_are_refused_by_name(build, words):
    with pytest.raises(ValueError) as caught:
        build()
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
