"""Errors while reading: each names the batch, says what was wrong with it, and comes after the batches before it."""

import numpy as np
import pytest

from trainer.data import Dataset
from trainer.data.adapt import adapt
from trainer.data.reader import Reader

X, Y = np.arange(40, dtype=np.float32).reshape(10, 4), np.arange(10)


def breaks():
    yield X, Y
    yield X, Y
    raise OSError("disk gone")


def mapped_break():
    def fn(x, y):
        if y[0] >= 4:
            raise OSError("disk gone")
        return x, y

    return Dataset.from_arrays((X, Y)).batch(2).map(fn)


@pytest.mark.parametrize("data", [breaks, mapped_break])
@pytest.mark.parametrize("group_size", [1, 4])
def test_an_error_of_the_pipeline_names_the_batch_after_those_before_it(data, group_size):
    received = []
    groups = Reader(adapt(data()), group_size=group_size).read(0)
    with pytest.raises(RuntimeError, match=r"OSError at batch 2: disk gone") as caught:
        received.extend(groups)
    assert sum(group.count for group in received) == 2
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((X[:, :, None], Y), ["`x`", "(10, 4, 1)", "(10, 4)"]),
        ((X, Y.astype(np.float32)), ["`y`", "float32", "int32"]),
        ((X,), ["structure", "(10, 4)"]),
        (({"a": X}, Y), ["structure"]),
        ((X, Y[:9]), ["`x`", "(10, 4)", "`y`", "(9,)", "rows"]),
        ((X[:0], Y[:0]), ["empty", "(0, 4)"]),
        ((X, np.array(["a"] * 10)), ["`y`", "numeric", "<U1"]),
        ((X, 3), ["`y`", "scalar"]),
        ((X[0], Y[:1]), ["`x`", "(4,)", "single rows", "DataLoader"]),
        ((X, [[1, 2], [3]]), ["list", "array"]),
    ],
)
def test_a_batch_unlike_the_first_or_inconsistent_is_refused_by_number(second, words):
    with pytest.raises(ValueError) as caught:
        list(Reader(adapt(iter([(X, Y), second]))).read(0))
    assert not [word for word in ["batch 1", *words] if word not in str(caught.value)], str(caught.value)


def test_batches_are_compared_with_the_first_of_the_run_not_of_the_epoch():
    data = [[X], [X[:, :, None]]]

    class Changing:
        def __iter__(self):
            return iter(data.pop(0))

    reader = Reader(adapt(Changing()))
    list(reader.read(0))
    with pytest.raises(ValueError, match="batch 0"):
        list(reader.read(1))


def test_rows_in_the_place_of_batches_are_explained():
    class OfRows:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return X[index], Y[index:index + 1]

    with pytest.raises(ValueError, match=r"single rows.*`DataLoader\(data, batch_size=32\)`, or `.batch\(32\)`"):
        list(Reader(adapt(OfRows())).read(0))
