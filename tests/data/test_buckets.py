"""`bucketed`: rows of similar lengths in batches of few lengths, in an order that any process finds again."""

import collections

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.networks import mirrored
from trainer.data import bucketed
from trainer.data.adapt import adapt
from trainer.data.reader import Reader

rng = np.random.default_rng(0)
LENGTHS = [5, 1, 8, 3, 4, 2, 7, 8, 4, 6, 1, 5, 3]
TOKENS = [rng.integers(1, 20, length) for length in LENGTHS]
LABELS = [rng.integers(0, 5, length) for length in LENGTHS]


def rows_of(batches):
    return sorted(tuple(row[row > 0].tolist()) for x, *_ in batches for row in x)


def test_each_pass_has_every_row_once_in_a_new_order_from_any_batch_on():
    data = bucketed((TOKENS, LABELS), [4, 8], [4, 2], seed=3)
    passes = [[jax.tree.map(np.ndarray.tolist, batch) for batch in data.read(number)] for number in range(3)]
    for number, batches in enumerate(passes):
        assert len(batches) == len(data)
        assert rows_of(data.read(number)) == sorted(tuple(row.tolist()) for row in TOKENS)
        assert [jax.tree.map(np.ndarray.tolist, batch) for batch in data.read(number, 2)] == batches[2:]
    assert passes[0] != passes[1] != passes[2]
    assert passes[1] == [jax.tree.map(np.ndarray.tolist, batch) for batch in
                         bucketed((TOKENS, LABELS), [4, 8], [4, 2], seed=3).read(1)]


def test_batches_have_the_lengths_and_rows_of_their_buckets():
    data = bucketed((TOKENS, LABELS), [4, 8], max_tokens=16)
    shapes = {x.shape for x, *_ in data}
    assert data.bucket_batch_sizes == (4, 2) and data.rows == 13
    assert shapes == {(4, 4), (3, 4), (2, 8)} and data.num_shapes == 3
    whole = bucketed((TOKENS, LABELS), [4, 8], [4, 2], drop_remainder=True)
    assert {x.shape for x, *_ in whole} == {(4, 4), (2, 8)} and (whole.rows, whole.num_shapes) == (10, 2)
    assert len(whole) == len(list(whole)) == 4


def test_without_shuffling_a_batch_comes_when_its_bucket_is_full():
    data = bucketed((LENGTHS, TOKENS), [4, 8], 2, shuffle=False)
    assert [x.tolist() for x, *_ in data] == [[5, 8], [1, 3], [4, 2], [7, 8], [4, 1], [6, 5], [3]]


def test_padding_is_masked_in_weights_or_in_an_input():
    rows, labels = [[1, 2], [3]], [[5, 6], [7]]
    x, y, weight = next(iter(bucketed((rows, labels), [3], 2, shuffle=False, padding_values=(0, -100))))
    assert x.tolist() == [[1, 2, 0], [3, 0, 0]] and y.tolist() == [[5, 6, -100], [7, -100, -100]]
    assert weight.tolist() == [[1, 1, 0], [1, 0, 0]] and weight.dtype == np.float32
    *_, weight = next(iter(bucketed((rows, labels, np.array([2.0, 3.0])), [3], 2, shuffle=False)))
    assert weight.tolist() == [[2, 2, 0], [3, 0, 0]]
    *_, weight = next(iter(bucketed((rows, labels, [[1, 0], [4]]), [3], 2, shuffle=False)))
    assert weight.tolist() == [[1, 0, 0], [4, 0, 0]]
    *_, weight = next(iter(bucketed((rows, {"a": labels, "b": np.zeros(2)}), [3], 2, shuffle=False)))
    assert weight["a"].tolist() == [[1, 1, 0], [1, 0, 0]] and weight["b"].tolist() == [1, 1]
    assert len(next(iter(bucketed((rows, np.zeros(2)), [3], 2)))) == 2, "targets without places need no weights"
    x, y = next(iter(bucketed(({"ids": rows, "size": [2, 1]}, labels), [3], 2, mask="mask", shuffle=False)))
    assert x["mask"].tolist() == [[True, True, False], [True, False, False]] and x["size"].tolist() == [2, 1]
    assert next(iter(bucketed(rows, [2], 2, shuffle=False))).tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(("arguments", "options", "message"), [
    ((TOKENS, [4, 7], 2), {}, r"Row 2 has the length 8, and the last of `bucket_boundaries` is 7"),
    ((TOKENS, [8, 4], 2), {}, r"must increase\. Received: \[8, 4\]"),
    ((TOKENS, [], 2), {}, "must be a list of lengths"),
    ((TOKENS, [8]), {}, "either by `bucket_batch_sizes` or by `max_tokens`"),
    ((TOKENS, [8], 2), {"max_tokens": 8}, "either by `bucket_batch_sizes` or by `max_tokens`"),
    ((TOKENS, [8]), {"max_tokens": 7}, r"`max_tokens` is less than the last.*Received: 7"),
    ((TOKENS, [8], [2, 3]), {}, r"for each of the 1 `bucket_boundaries`\. Received: 2"),
    (((TOKENS, [row[1:] for row in TOKENS]), [8], 2), {}, "row 0 has the length 4, and in the first .* the length 5"),
    (((TOKENS, np.zeros(3)), [8], 2), {}, r"equally many rows, and some\. Received: x: 13, y: 3"),
    (((tuple(TOKENS), LABELS), [8], 2), {}, r"Received: x\[0\]: 5, .*A column is a list or an array: a tuple"),
    ((TOKENS, [8], 2), {"padding_values": 0.5}, r"must fit into the dtype of `x`, int64\. Received: 0\.5"),
    ((TOKENS, [8], 2), {"padding_values": np.nan}, r"must fit into the dtype of `x`, int64\. Received: nan"),
    ((TOKENS, [8], 2), {"padding_values": 2**63}, r"must fit into the dtype of `x`, int64"),
    ((np.zeros((3, 4)), [8], 2), {}, "no column of sequences"),
    ((TOKENS, [8], 2), {"mask": "mask"}, "the name of a further input, so `x` must be a dict"),
    (((TOKENS, LABELS), [8], 2), {"padding_values": (0, 0, 0)}, "numbers in the structure of `data`"),
    (((TOKENS, LABELS, {"a": np.ones(13)}), [8], 2), {}, "`sample_weight` must have the structure of `y`"),
    ((TOKENS, [8], 20), {"drop_remainder": True}, "leaves no batch"),
])
def test_contradictions_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        bucketed(*arguments, **options)


@pytest.mark.parametrize(("data", "options", "message"), [
    (iter(TOKENS), {}, r"`x` of `data` must be a list or an array with an item per row\. Received: list_iterator"),
    ([*TOKENS, None], {}, rf"Each item of `x` must be a sequence.*Received: NoneType for row {len(TOKENS)}"),
    (TOKENS, {"padding_values": "0"}, r"`padding_values` must be a number.*Received: str for `x`"),
    (TOKENS, {"padding_values": None}, r"`padding_values` must be a number"),
])
def test_what_is_no_column_or_no_number_is_refused(data, options, message):
    with pytest.raises(TypeError, match=message):
        bucketed(data, [8], 2, **options)


def test_arrays_of_sequences_are_columns():
    rows = np.empty(2, object)
    rows[:] = [np.array([1, 2]), np.array([3])]
    x, y, weight = next(iter(bucketed((rows, rows), [3], 2, padding_values=(0, -1), shuffle=False)))
    assert (x.tolist(), y.tolist()) == ([[1, 2, 0], [3, 0, 0]], [[1, 2, -1], [3, -1, -1]])
    assert weight.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert next(iter(bucketed(collections.UserList([[1, 2], [3]]), [2], 2, shuffle=False))).tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_run_goes_on_at_any_batch_without_making_earlier_batches(steps):
    def begun():
        return Reader(adapt(bucketed((TOKENS, LABELS), [4, 8], 2)), steps)

    def read(reader, epoch, batch):
        return [jax.tree.map(lambda leaf: leaf[0].tolist(), group.data) for group in reader.read(epoch, batch)]

    with begun() as reader:
        epochs = [read(reader, epoch, 0) for epoch in range(3)]
        positions = {(epoch, batch): reader.position(epoch, batch) for epoch in range(3) for batch in range(3)}
    for (epoch, batch), position in positions.items():
        with begun() as reader:
            reader.peek()
            assert reader.resume(epoch, batch, position) == 0
            assert read(reader, epoch, batch) == epochs[epoch][batch:]


def tagger(replicas=1, **options):
    with mirrored(replicas).scope():
        model = trainer.Model(nn.Sequential([nn.Embed(20, 4), nn.Dense(5)]), seed=1)
        model.compile(optax.sgd(0.5), trainer.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"), weighted_metrics=["accuracy"],
            compile_guard="error", **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "steps"), [(1, 1), (1, 4), (3, 1)])
def test_a_training_has_the_numbers_of_a_loop_by_hand_over_the_real_tokens(replicas, steps):
    data = bucketed((TOKENS, LABELS), [4, 8], [4, 3], seed=1)
    model = tagger(replicas, steps_per_execution=steps)
    model.build(TOKENS[0][None])
    params, module = model.state.params, nn.Sequential([nn.Embed(20, 4), nn.Dense(5)])
    params = jax.tree.map(np.asarray, params)
    model.fit(data, verbose=0)
    correct, weight = 0.0, 0.0
    for x, *_ in data.read(0):
        rows = [next(number for number in range(13) if TOKENS[number].tolist() == row[row > 0].tolist()) for row in x]
        ids, labels = (np.concatenate([parts[row] for row in rows]) for parts in (TOKENS, LABELS))
        gradients = jax.grad(lambda params, ids=ids, labels=labels: optax.softmax_cross_entropy_with_integer_labels(
            module.apply({"params": params}, ids), labels).mean())(params)
        params = jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, params, gradients)
    for mine, theirs in zip(jax.tree.leaves(model.state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)
    for x, y, weights in data.read(0):  # metrics average the places of a row first, as Keras's
        is_right = np.asarray(module.apply({"params": params}, x)).argmax(-1) == y
        correct, weight = correct + (is_right * weights).mean(1).sum(), weight + weights.mean(1).sum()
    assert model.evaluate(data, verbose=0)["accuracy"] == pytest.approx(correct / weight, rel=1e-5)


@pytest.mark.slow
def test_the_guard_knows_the_shapes_of_buckets_and_takes_a_number_of_shapes():
    two = [np.ones((4, length), np.int32) for length in (3, 5, 3, 5)]
    model = tagger()
    model.compile("sgd", "mse", compile_guard=2)
    model.fit([(ids, np.zeros((4, ids.shape[1], 5))) for ids in two], verbose=0)
    model.compile("sgd", "mse", compile_guard=2)
    with pytest.warns(RuntimeWarning, match=r"time 3 in this run.*as `trainer\.data\.bucketed` does, or allow a"):
        model.fit([(np.ones((4, length), np.int32), np.zeros((4, length, 5))) for length in (3, 5, 7)], verbose=0)
    with pytest.raises(ValueError, match=r"compile_guard.*at least 1"):
        model.compile("sgd", "mse", compile_guard=0)


def test_batches_with_class_weights_have_the_shapes_of_their_buckets():
    classes = np.array([0, 1] * 7)[:13]
    data = bucketed((TOKENS, classes), [2, 4, 6, 8], 2)
    assert Reader(adapt(data, class_weight={0: 1.0, 1: 2.0})).num_shapes == data.num_shapes > 2
