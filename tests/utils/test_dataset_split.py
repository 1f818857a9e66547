"""Splitting data, beside Keras's rows on generated sizes."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import utils
from trainer.data import Dataset

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    from keras.src.utils import dataset_utils

X, Y = np.arange(20.0, dtype=np.float32).reshape(10, 2), np.arange(10, dtype=np.int32)


def rows(dataset):
    return [np.asarray(y).tolist() for _, y in dataset]


def rows_of_keras(left_size, right_size, shuffle, seed):
    """What `keras.utils.split_dataset` makes datasets of; it needs TensorFlow for that alone."""
    elements = dataset_utils._convert_dataset_to_list((X, Y), tuple)
    if shuffle:
        random.seed(seed)
        random.shuffle(elements)
    left, right = dataset_utils._rescale_dataset_split_sizes(left_size, right_size, len(elements))
    return [int(y) for _, y in elements[:left]], [int(y) for _, y in elements[-right:]]


SIZES = st.none() | st.integers(1, 9) | st.floats(0.05, 0.95)


@pytest.mark.slow
@settings(max_examples=300)
@given(left_size=SIZES, right_size=SIZES, shuffle=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_rows_are_kerass(left_size, right_size, shuffle, seed):
    try:
        expected = rows_of_keras(left_size, right_size, shuffle, seed)
    except (ValueError, TypeError):
        with pytest.raises(ValueError, match="left_size"):
            utils.split_dataset((X, Y), left_size, right_size, shuffle, seed)
        return
    left, right = utils.split_dataset((X, Y), left_size, right_size, shuffle, seed)
    assert (rows(left), rows(right)) == expected


def test_without_a_seed_the_order_is_that_of_python_s_random():
    random.seed(5)
    expected = rows_of_keras(7, None, True, random.randint(0, int(1e6)))
    random.seed(5)
    assert rows(utils.split_dataset((X, Y), 7, shuffle=True)[0]) == expected[0]
    random.seed(5)
    state = random.getstate()
    utils.split_dataset((X, Y), 7, shuffle=True, seed=1)
    assert random.getstate() == state


class Indexed:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize("data", [
    pytest.param(lambda: [X, Y], id="list"),
    pytest.param(lambda: Dataset.from_arrays((X, Y)), id="dataset"),
    pytest.param(lambda: Dataset.from_arrays((X, Y)).map(lambda x, y: (x, y)), id="mapped dataset"),
    pytest.param(lambda: zip(X, Y, strict=True), id="iterator"),
    pytest.param(lambda: ((x, y) for x, y in zip(X, Y, strict=True)), id="generator"),
    pytest.param(Indexed, id="indexed"),
])
def test_each_kind_of_data_is_split_alike(data):
    left, right = utils.split_dataset(data(), right_size=0.3, shuffle=True, seed=3)
    expected = rows_of_keras(None, 0.3, True, 3)
    assert (rows(left), rows(right)) == expected
    assert all(x.tolist() == X[y].tolist() for x, y in [*left, *right])


def test_a_dict_keeps_its_structure_and_an_array_stays_one():
    left, right = utils.split_dataset({"x": X, "y": Y}, 0.8)
    assert next(iter(right))["y"] == 8 and next(iter(left)).keys() == {"x", "y"}
    assert [row.tolist() for row in utils.split_dataset(Y, 2)[0]] == [0, 1]


def test_batches_are_split_by_rows_and_batched_again():
    left, right = utils.split_dataset(Dataset.from_arrays((X, Y)).shuffle(1).batch(4), left_size=6)
    assert (left.batch_size, [len(y) for _, y in left], [len(y) for _, y in right]) == (4, [4, 2], [4])
    order = [y for _, batch in [*left, *right] for y in batch.tolist()]
    assert order == [y for _, batch in Dataset.from_arrays((X, Y)).shuffle(1).batch(4) for y in batch.tolist()]


def test_what_is_split_can_be_trained_on_in_any_order():
    left, _ = utils.split_dataset((X, Y), 0.8)
    assert sorted(y for _, batch in left.shuffle(0).batch(3) for y in batch.tolist()) == list(range(8))


@pytest.mark.parametrize(("data", "arguments", "error", "message"), [
    (Y, {}, ValueError, "`left_size` or `right_size` must be given"),
    (Y, {"left_size": 1.5}, ValueError, "`left_size` must be a share between 0 and 1"),
    (Y, {"left_size": 0}, ValueError, "`left_size` must be a number of rows of at least 1"),
    (Y, {"right_size": "half"}, TypeError, "`right_size` must be a number of rows"),
    (Y, {"left_size": 10}, ValueError, "are 10 and 0 rows"),
    (Y, {"left_size": 0.5, "right_size": 0.53}, ValueError, "must be shares of no more than all rows"),
    (Y, {"left_size": 7, "right_size": 0.5}, ValueError, "are 7 and 5 rows"),
    (Y, {"left_size": 3, "shuffle": 1}, TypeError, "`shuffle` must be True or False"),
    (3, {"left_size": 3}, ValueError, "must have at least one dimension, the rows"),
    (iter([]), {"left_size": 3}, ValueError, "`dataset` is empty"),
    (iter([np.ones(2), np.ones(3)]), {"left_size": 1}, ValueError, "one structure and one shape"),
    (Dataset.from_arrays(Y).repeat(), {"left_size": 3}, ValueError, "`dataset` is endless"),
])
def test_bad_input_is_named(data, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        utils.split_dataset(data, **arguments)
