"""The modules of feature columns: their parameters, gradients and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from trainer.estimator import feature_columns as fc
from trainer.estimator.feature_columns import DenseFeatures, HostTransform, LinearFeatures, SequenceFeatures

COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])
CITY = fc.categorical_column_with_hash_bucket("city", 50)
WATCHED, SHOWN = (fc.categorical_column_with_identity(key, 20) for key in ("watched", "shown"))
SEQUENCE = fc.sequence_categorical_column_with_identity("steps", 5)
FEATURES = {"color": ["red", "blue"], "city": ["a", ""], "watched": [1, 2], "shown": [1, 3], "x": [1.0, 2.0],
            "steps": [[1, 2], [3, -1]]}


def initialized(module):
    features = HostTransform(module.columns)(FEATURES)
    return features, module.init(jax.random.key(0), features)


def shapes(variables):
    return jax.tree.map(np.shape, variables)


@pytest.mark.slow
def test_tables_have_the_names_of_their_columns():
    columns = [fc.embedding_column(COLOR, 3), fc.embedding_column(CITY, 2), fc.indicator_column(COLOR),
               *fc.shared_embeddings([WATCHED, SHOWN], 4)]
    features, variables = initialized(DenseFeatures(columns))
    assert shapes(variables) == {"params": {
        "color_embedding": {"embedding": (2, 3)}, "city_embedding": {"embedding": (50, 2)},
        "shown_watched_shared_embedding": {"embedding": (20, 4)}}}
    x = DenseFeatures(columns).apply(variables, features)
    assert x.shape == (2, 3 + 2 + 2 + 4 + 4)
    shown, watched = x[0, 7:11], x[0, 11:]
    np.testing.assert_array_equal(shown, watched)  # both are id 1 of one table


@pytest.mark.slow
def test_tables_start_as_normal_distributions_cut_at_two_standard_deviations():
    columns = [fc.embedding_column(fc.categorical_column_with_identity("watched", 5000), 16)]
    _, variables = initialized(DenseFeatures(columns))
    table, scale = variables["params"]["watched_embedding"]["embedding"], 1 / math.sqrt(16)
    assert np.abs(table).max() <= 2 * scale
    np.testing.assert_allclose(table.std(), 0.88 * scale, rtol=0.02)
    np.testing.assert_allclose(table.mean(), 0, atol=0.01)


@pytest.mark.slow
def test_a_table_may_have_another_initializer():
    _, variables = initialized(DenseFeatures([fc.embedding_column(COLOR, 3, initializer=nn.initializers.ones)]))
    assert (variables["params"]["color_embedding"]["embedding"] == 1).all()


def test_a_table_that_is_not_trained_is_no_parameter():
    columns = [fc.embedding_column(COLOR, 3, trainable=False), fc.embedding_column(CITY, 2)]
    features, variables = initialized(DenseFeatures(columns))
    assert shapes(variables) == {"params": {"city_embedding": {"embedding": (50, 2)}},
                                 "non_trainable": {"color_embedding": {"embedding": (2, 3)}}}
    x = DenseFeatures(columns).apply(variables, features)
    np.testing.assert_array_equal(x[0, 2:], variables["non_trainable"]["color_embedding"]["embedding"][0])


@pytest.mark.slow
def test_a_linear_model_starts_at_zero():
    columns = [COLOR, CITY, fc.numeric_column("x"), fc.crossed_column(["color", "city"], 30)]
    features, variables = initialized(LinearFeatures(columns, units=3))
    assert shapes(variables) == {"params": {
        "bias": (3,), "city": {"weights": (50, 3)}, "city_X_color": {"weights": (30, 3)}, "color": {"weights": (2, 3)},
        "x": {"weights": (1, 3)}}}
    assert not any(leaf.any() for leaf in jax.tree.leaves(variables))
    assert not LinearFeatures(columns, units=3).apply(variables, features).any()


@pytest.mark.slow
@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "sum"])
def test_rows_without_a_value_have_gradients_of_zero(combiner):
    module = DenseFeatures([fc.embedding_column(COLOR, 2, combiner=combiner, max_norm=1.0)])
    features, variables = initialized(module)
    gradient = jax.grad(lambda params: jnp.sum(jnp.square(module.apply({"params": params}, features))))(
        variables["params"])["color_embedding"]["embedding"]
    assert np.isfinite(gradient).all()
    assert gradient[0].any() and not gradient[1].any()


@pytest.mark.slow
def test_a_table_of_zeros_has_finite_gradients_below_a_norm():
    module = DenseFeatures([fc.embedding_column(COLOR, 2, max_norm=1.0, initializer=nn.initializers.zeros)])
    features, variables = initialized(module)
    gradient = jax.grad(lambda params: jnp.sum(module.apply({"params": params}, features)))(variables["params"])
    assert gradient["color_embedding"]["embedding"].tolist() == [[1, 1], [0, 0]]


def test_equal_modules_are_one_for_jax():
    first, second = (DenseFeatures([fc.numeric_column("x"), fc.embedding_column(COLOR, 2)]) for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_normalizers_run_on_the_device():
    seen = []
    column = fc.numeric_column("x", normalizer_fn=lambda x: seen.append(type(x)) or jnp.log1p(x))
    features = HostTransform(column)(FEATURES)
    assert seen == []
    x = jax.jit(DenseFeatures([column]).apply)({}, features)
    assert issubclass(seen[0], jax.core.Tracer)
    np.testing.assert_allclose(x, np.log1p([[1], [2]]), rtol=1e-6)


def test_buckets_on_the_device_are_those_on_the_host():
    values = np.random.default_rng(0).uniform(-3, 3, 200).astype(np.float32)
    edges = sorted(values[:20].tolist())
    numbers = fc.numeric_column("x", normalizer_fn=lambda x: x * 1.5)
    column = fc.bucketized_column(numbers, [edge * 1.5 for edge in edges])
    raw = {"x": np.append(values, [np.nan, np.inf, -np.inf])}
    crossed = HostTransform(fc.crossed_column([column, fc.categorical_column_with_identity("i", 1)], 2**31 - 1))
    hashes = crossed(raw | {"i": np.zeros(203, int)})["i_X_x_bucketized/cross_2147483647"][:, 0]
    buckets = np.argmax(DenseFeatures([column]).apply({}, HostTransform(column)(raw)), axis=1)
    assert len({(bucket, number) for bucket, number in zip(buckets.tolist(), hashes.tolist(), strict=True)}) == len(
        set(buckets.tolist())) == len(set(hashes.tolist())) == 21


@pytest.mark.parametrize(("module", "features", "error", "message"), [
    (DenseFeatures([fc.indicator_column(COLOR)]), {"color": jnp.ones(2)}, ValueError,
     r"'color_?.* reads 'color/vocabulary_2' on the device.*Map the data by `HostTransform\(columns\)`"),
    (DenseFeatures([fc.numeric_column("x")]), jnp.ones((2, 1)), TypeError, "by name: give the dict that `Host"),
    (LinearFeatures([COLOR]), jnp.ones((2, 1)), TypeError, "by name: give the dict that `HostTransform`"),
    (SequenceFeatures([fc.sequence_numeric_column("x")]), jnp.ones((2, 1)), TypeError, "by name: give the dict"),
    (SequenceFeatures([fc.sequence_numeric_column("x"), fc.indicator_column(SEQUENCE)]),
     {"x/sequence": jnp.ones((2, 3, 1)), "x/sequence/lengths": jnp.ones(2, int),
      "steps/sequence_identity_5": jnp.ones((2, 2, 1), int)}, ValueError, "'steps_indicator' has 2, 'x' has 3"),
])
def test_features_that_do_not_fit_are_refused(module, features, error, message):
    with pytest.raises(error, match=message):
        module.init(jax.random.key(0), features)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: DenseFeatures(COLOR), ValueError, "You can wrap a categorical column with an `embedding_column` or"),
    (lambda: DenseFeatures("x"), TypeError, "`columns` must be a sequence of feature columns"),
    (lambda: DenseFeatures([*fc.shared_embeddings([WATCHED], 2, shared_embedding_collection_name="t"),
                            *fc.shared_embeddings([SHOWN], 3, shared_embedding_collection_name="t")]), ValueError,
     "Two different tables have the name 't'"),
    (lambda: DenseFeatures([fc.sequence_numeric_column("x")]), ValueError, "'x' is of sequences"),
    (lambda: SequenceFeatures([fc.numeric_column("x")]), ValueError, "'x' is of no sequences"),
    (lambda: SequenceFeatures([SEQUENCE]), ValueError, "You can wrap a categorical column"),
    (lambda: LinearFeatures([SEQUENCE]), ValueError, "'steps' is of sequences, in which no linear model is"),
    (lambda: LinearFeatures([fc.numeric_column("bias")]), ValueError, "A column cannot have the name 'bias'"),
    (lambda: LinearFeatures([COLOR], units=0), ValueError, "`units` must be a whole number of at least 1"),
    (lambda: LinearFeatures([COLOR], sparse_combiner="max"), ValueError, "`sparse_combiner` must be one of"),
    (lambda: LinearFeatures([COLOR, COLOR]), ValueError, "Two columns have the name 'color'"),
])
def test_columns_that_do_not_fit_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
