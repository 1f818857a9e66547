"""`adapt` and what goes with it: arguments that are refused, packing, class weights, validation split."""

import warnings

import flax.linen as nn
import jax
import numpy as np
import pytest
import scipy.sparse

from trainer import Model, losses
from trainer.data import Dataset, pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.adapt import adapt, split_validation
from trainer.data.reader import Reader
from trainer.data.sources import arrays
from trainer.data.sources.arrays import DataError, HostArrays
from trainer.distribute.placement.placement import copy_to_devices

X, Y = np.arange(40, dtype=np.float32).reshape(10, 4), np.arange(10)


def generator():
    yield X, Y


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: adapt(X, Y[:9]), ["`x`", "(10, 4)", "`y`", "(9,)"]),
        (lambda: adapt({"a": X, "b": X[:3]}), ["x['a']", "x['b']", "(3, 4)"]),
        (lambda: adapt(X, Y, np.ones(9)), ["`sample_weight`", "(9,)"]),
        (lambda: adapt(X[:0], Y[:0]), ["empty"]),
        (lambda: adapt([]), ["empty"]),
        (lambda: adapt(X, Y, batch_size=0), ["batch_size", "0"]),
        (lambda: adapt(X, Y, batch_size=-3), ["batch_size", "-3"]),
        (lambda: adapt(X, Y, np.ones(10), class_weight={0: 1.0}), ["class_weight", "sample_weight"]),
        (lambda: adapt(X, Y, shuffle="rows"), ["shuffle"]),
        (lambda: adapt(3), ["`x`", "scalar", "int"]),
        (lambda: adapt(X, 3), ["`y`", "scalar"]),
        (lambda: adapt(X, generator()), ["y=generator", "`fit(train, validation_data=val)`"]),
        (lambda: adapt(X, np.array(["a"] * 10)), ["`y`", "<U1"]),
        (lambda: adapt(None), ["Unrecognized data type", "NoneType"]),
        (lambda: adapt(generator(), batch_size=3), ["generator", "Received: batch_size=3."]),
        (lambda: adapt("text"), ["Unrecognized data type", "str"]),
        (lambda: adapt(scipy.sparse.csr_matrix(X), Y), ["Sparse matrices", "x.toarray()"]),
        (lambda: adapt({"words": scipy.sparse.csr_array(X)}), ["Sparse matrices", "x.toarray()"]),
        (lambda: adapt(object()), ["Unrecognized data type", "object"]),
        (lambda: adapt((generator(), generator())), ["Unrecognized data type", "generator"]),
        (lambda: adapt({"a": generator()}), ["Unrecognized data type", "generator"]),
        (lambda: adapt(Dataset.from_arrays(X)), ["batch("]),
        (lambda: adapt(Dataset.from_arrays(X).batch(2), batch_size=2), ["Dataset", "batch_size"]),
        (lambda: adapt(Dataset.from_arrays(X).batch(2), Y), ["`x` as a Dataset", "`y`"]),
        (lambda: adapt(generator(), Y), ["providing `x` as a generator", "`y`"]),
        (lambda: adapt(generator(), sample_weight=np.ones(3)), ["providing `x` as a generator", "`sample_weight`"]),
        (lambda: Reader(adapt(X), steps_per_epoch=0), ["steps_per_epoch", "0"]),
        (lambda: Reader(adapt(X), group_size=0), ["group_size", "0"]),
    ],
)
def test_bad_arguments_are_refused_by_name(build, words):
    with pytest.raises(ValueError) as caught:
        build()
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((X,), X),
        (((X, X),), ((X, X),)),
        (({"a": X},), {"a": X}),
        ((X, Y), (X, Y)),
        ((X, Y, Y), (X, Y, Y)),
        ((X, None, Y), (X, None, Y)),
    ],
)
def test_batches_are_packed_as_keras_packs_them(arguments, expected):
    (batch,) = adapt(*arguments, batch_size=10).read(0)
    np.testing.assert_equal(batch, expected)
    assert type(batch) is type(expected)
    np.testing.assert_equal(pack_x_y_sample_weight(*arguments), expected)
    unpacked = unpack_x_y_sample_weight(batch)
    np.testing.assert_equal(unpacked, (*arguments, None, None)[:3])


def test_a_batch_of_four_parts_cannot_be_unpacked():
    with pytest.raises(ValueError, match="4 parts"):
        unpack_x_y_sample_weight((X, X, X, X))


def test_arrays_are_batched_by_32_and_shuffle_batch_keeps_rows_together():
    x = np.arange(100)
    assert [len(batch) for batch in adapt(x).read(0)] == [32, 32, 32, 4]
    assert adapt(x).rows == 100
    shuffled = [batch.tolist() for batch in adapt(x, batch_size=4, shuffle="batch").read(0)]
    assert sorted(shuffled) == [list(range(start, start + 4)) for start in range(0, 100, 4)]
    assert shuffled != sorted(shuffled)


LABELS = np.array([0, 2, 1, 2])


@pytest.mark.parametrize("y", [
    LABELS, LABELS[:, None], np.eye(3)[LABELS], LABELS.astype(float), np.eye(3, dtype=np.uint8)[LABELS],
    np.eye(3, dtype=bool)[LABELS], (0.7 * np.eye(3) + 0.1)[LABELS].astype(np.float16)])
@pytest.mark.parametrize("as_generator", [False, True])
def test_class_weight_gives_every_row_the_weight_of_its_label(y, as_generator):
    class_weight = {2: 5.0, 0: 1, 1: 0.5}
    x = np.zeros((4, 1))
    source = (adapt(iter([(x, y)]), class_weight=class_weight) if as_generator
              else adapt(x, y, batch_size=4, class_weight=class_weight))
    (batch,) = source.read(0)
    assert batch[2].tolist() == [1, 5, 0.5, 5]
    assert batch[2].dtype == np.float32


@pytest.mark.parametrize(
    ("class_weight", "y", "words"),
    [
        ({0: 1.0}, None, ["class_weight", "`y`", "NoneType"]),
        ({0: 1.0}, (np.zeros(3, int), np.zeros(3, int)), ["single array"]),
        ({0: 1.0}, np.zeros((3, 2, 2), int), ["(3, 2, 2)", "sample_weight"]),
        ({0: 1.0}, np.array([[0, 2, 1], [0, 0, 1], [1, 1, 0]]), ["(3, 3)", "int64", "2 of 3 rows", "sample_weight"]),
        ({0: 1.0}, np.array([[1, 0], [0, 0], [0, 1]], np.uint8), ["one-hot", "1 of 3 rows"]),
        ({0: 1.0}, np.array([[True, True], [True, False], [False, True]]), ["one-hot", "1 of 3 rows"]),
        ({0: 1.0}, np.array([[2.0, -1.0], [0.5, 0.5], [np.nan, 1.0]]), ["add up to 1", "2 of 3 rows"]),
        ({0: 1.0}, np.array([0.05, 0.95, 1.37]), ["classes", "1.37", "sample_weight"]),
        ({0: 1.0}, np.array([[0.0], [np.nan], [1.0]]), ["classes", "nan"]),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(class_weight, y, words):
    with pytest.raises(ValueError) as caught:
        adapt(np.zeros((3, 1)), y, class_weight=class_weight)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("as_batches", [False, True])
def test_a_class_weight_of_a_class_that_no_label_has_is_said_once(as_batches):
    y, class_weight = LABELS.astype(float), {0: 1.0, 1: 2.0, 7: 3.0, -1: 4.0}
    data = ([(np.zeros((2, 1)), y[:2]), (np.zeros((2, 1)), y[2:])],) if as_batches else (np.zeros((4, 1)), y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = adapt(*data, class_weight=class_weight)
        for epoch in (0, 1):
            list(source.read(epoch))
    (said,) = caught
    assert "weights of -1, 7, which no label" in str(said.message)


@pytest.mark.slow
def test_a_batch_need_not_have_each_class():
    model = Model(nn.Dense(3))
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    one, other = (model.test_on_batch(X, np.zeros(10, int)),
                  model.train_on_batch(X, np.zeros(10, int), class_weight={0: 2.0, 1: 1.0}))
    assert other == pytest.approx(2 * one)


def test_class_weight_with_batches_that_bring_weights_is_refused():
    with pytest.raises(ValueError, match=r"batch 0.*class_weight.*sample_weight"):
        list(Reader(adapt(iter([(X, Y, Y)]), class_weight={0: 1.0})).read(0))


@pytest.mark.parametrize(("rows", "fraction", "expected"), [(10, 0.2, 8), (10, 0.25, 7), (500, 0.2, 400), (3, 0.5, 1)])
def test_validation_split_takes_the_last_rows_as_keras_does(rows, fraction, expected):
    data = {"a": np.arange(rows)}, np.arange(rows).tolist(), None
    train, validation = (part.tree for part in split_validation(data, fraction))
    assert train[0]["a"].tolist() == train[1].tolist() == list(range(expected))
    assert validation[0]["a"].tolist() == validation[1].tolist() == list(range(expected, rows))
    assert train[2] is validation[2] is None
    assert np.shares_memory(train[0]["a"], data[0]["a"])


@pytest.mark.parametrize(
    ("data", "fraction", "words"),
    [
        (X, 1.5, ["validation_split", "1.5"]),
        (X, 0.0, ["validation_split", "=0."]),
        (X[:1], 0.5, ["validation_split", "empty"]),
        ((X, Y[:3]), 0.5, ["rows"]),
        (generator(), 0.5, ["validation_split", "only supported for arrays", "generator"]),
        (([(X[:3], Y[:3]), (X[3:6], Y[3:6])], None, None), 0.5, ["validation_split", "only supported for arrays"]),
    ],
)
def test_bad_validation_splits_are_refused(data, fraction, words):
    with pytest.raises(ValueError) as caught:
        split_validation(data, fraction)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_classes_without_a_weight_weigh_one():
    source = adapt(np.zeros((3, 1)), np.array([0, 1, 7]), class_weight={1: 5.0})
    np.testing.assert_array_equal(next(iter(source.read(0)))[2], [1.0, 5.0, 1.0])


def test_steps_without_a_batch_size_split_the_rows_as_keras_does():
    assert [len(x) for x in adapt(np.zeros((10, 1)), steps=4).read(0)] == [3, 3, 3, 1]


def test_a_numpy_matrix_is_an_array_like_any_other():
    batch = next(adapt(np.ones((2, 2)).view(np.matrix)).read(0))
    assert type(batch) is np.ndarray and batch.shape == (2, 2)


WIDE = np.array([[1_700_000_000_000], [-3]])


def by_items(batch):
    class Items:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return batch

    return Items()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: adapt(WIDE), ["`x`", "int64", "int32", "(2, 1)", "from -3 to 1700000000000", '.astype("float32")']),
        (lambda: adapt({"a": X[:2], "b": WIDE.astype(np.uint64)}), ["`x['b']`", "uint64", "uint32", "jax_enable_x64"]),
        (lambda: adapt(X[:2], [2**32 + 1, 0]), ["`y`", "from 0 to 4294967297"]),
        (lambda: Dataset.from_arrays((X[:2], WIDE)), ["`y`", "offset"]),
        (lambda: next(Reader(adapt(iter([(X[:2], WIDE)]))).read(0)), ["batch 0", "`y`", "from -3 to 1700000000000"]),
        (lambda: next(Reader(adapt(by_items((WIDE, X[:2])))).read(0)), ["batch 0", "`x`", "int32"]),
        (lambda: list(adapt(X).dataset.map(lambda x: WIDE)), ["`x`", "int32"]),
    ],
)
def test_integers_that_would_wrap_around_are_refused(read, words):
    with pytest.raises(ValueError) as caught:
        read()
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_a_later_batch_of_integers_that_would_wrap_around_is_refused():
    batches = [np.arange(2), np.arange(2), np.array([0, 2**31])]
    with pytest.raises(ValueError, match=r"batch 2.*`x` must fit into int32.*from 0 to 2147483648"):
        list(Reader(adapt(iter(batches)), group_size=4).read(0))


@pytest.mark.parametrize("as_generator", [False, True])
def test_wide_integers_whose_values_fit_are_narrowed(as_generator):
    bounds = np.array([-2**31, 2**31 - 1]), np.array([0, 2**32 - 1], np.uint64), np.array([1.0, np.inf])
    batch = next(Reader(adapt(iter([bounds]) if as_generator else Dataset.from_arrays(bounds).batch(2))).read(0))
    assert [leaf.dtype for leaf in batch.data] == [np.int32, np.uint32, np.float32]
    assert [leaf[0].tolist() for leaf in batch.data[:2]] == [leaf.tolist() for leaf in bounds[:2]]


HUGE = np.array([[1.0], [1e39], [np.inf], [np.nan]])


@pytest.mark.parametrize("read", [
    lambda: next(adapt(X[:4], HUGE).read(0)),
    lambda: list(Reader(adapt(Dataset.from_arrays((X[:4], HUGE)).batch(2).map(lambda *batch: batch))).read(0)),
    lambda: list(Reader(adapt(iter([(X[:2], HUGE[2:]), (X[:2], HUGE[:2])])), group_size=4).read(0)),
    lambda: copy_to_devices(HostArrays.of((X[:4], HUGE)), jax.sharding.SingleDeviceSharding(jax.devices()[0])),
], ids=["arrays", "dataset", "a later batch", "on the devices"])
def test_floats_that_would_become_infinite_are_refused(read):
    with pytest.raises(DataError, match=r"`y` must fit into float32.*float64.*would become infinite"):
        read()


def test_infinities_and_nan_stay_and_tiny_numbers_become_zero():
    values = np.array([np.inf, -np.inf, np.nan, 1e-300])
    batch, = Reader(adapt(iter([values]))).read(0)
    np.testing.assert_array_equal(batch.data[0], np.float32([np.inf, -np.inf, np.nan, 0.0]))


def test_arrays_without_numbers_are_narrowed():
    assert next(adapt(np.zeros((2, 0), np.int64)).read(0)).dtype == np.int32


def test_integers_of_64_bits_stay_as_they_are_where_jax_has_them():
    with jax.enable_x64(True):
        assert next(adapt(WIDE).read(0)).tolist() == WIDE.tolist()
        (group,) = Reader(adapt(iter([WIDE]))).read(0)
        assert group.data[0].tolist() == WIDE.tolist()


def test_arrays_are_looked_at_once_and_not_when_rows_are_read(monkeypatch):
    looked_at = []
    monkeypatch.setattr("trainer.data.sources.arrays.check_integers_fit", looked_at.append)
    reader = Reader(adapt(np.arange(100), batch_size=4))
    for epoch in range(3):
        list(reader.read(epoch))
    assert len(looked_at) == 1


def test_batches_in_the_dtypes_of_jax_are_looked_at_once(monkeypatch):
    looked_at = []
    monkeypatch.setattr("trainer.data.sources.arrays.check_integers_fit", looked_at.append)
    list(Reader(adapt(iter([X, X, X])), group_size=3).read(0))
    assert len(looked_at) == 1


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("validation", [{"validation_split": 0.25}, {"validation_data": (X[:4], Y[:4], Y[:4])}])
def test_a_fit_converts_each_array_once(validation, monkeypatch):
    converted = []
    convert = arrays._to_numpy
    monkeypatch.setattr(arrays, "_to_numpy", lambda leaf, *name: converted.append(leaf) or convert(leaf))
    model = Model(nn.Dense(1))
    model.compile("sgd", "mse")
    given = X.tolist(), Y, np.ones(10)
    model.fit(*given[:2], sample_weight=given[2], epochs=2, batch_size=4, verbose=0, **validation)
    expected = [*given, *validation.get("validation_data", ())]
    assert [id(leaf) for leaf in converted[:len(expected)]] == [id(leaf) for leaf in expected]
    # The others are batches, which were gathered.
    assert not any(np.shares_memory(leaf, array) for leaf in converted[len(expected):] for array in expected[1:])
