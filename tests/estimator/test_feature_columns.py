"""Feature columns as descriptions: equal, hashable, readable, and refused where they describe nothing."""

import numpy as np
import pytest

from trainer.estimator import feature_columns as fc

COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])
SEQUENCE = fc.sequence_categorical_column_with_identity("watched", 5)
X = fc.numeric_column("x")


def halve(x):
    return x / 2


MAKERS = {
    "numeric": lambda: fc.numeric_column("x", shape=[2], default_value=[1, 2], normalizer_fn=halve),
    "bucketized": lambda: fc.bucketized_column(fc.numeric_column("x"), [1, 2]),
    "vocabulary": lambda: fc.categorical_column_with_vocabulary_list("color", ["red", "green"]),
    "identity": lambda: fc.categorical_column_with_identity("day", 7),
    "hash": lambda: fc.categorical_column_with_hash_bucket("city", 10),
    "crossed": lambda: fc.crossed_column([COLOR, "city"], 10),
    "weighted": lambda: fc.weighted_categorical_column(COLOR, "w"),
    "indicator": lambda: fc.indicator_column(COLOR),
    "embedding": lambda: fc.embedding_column(COLOR, 2),
    "shared": lambda: fc.shared_embeddings([COLOR], 2)[0],
    "sequence": lambda: fc.sequence_categorical_column_with_hash_bucket("city", 10),
    "sequence of numbers": lambda: fc.sequence_numeric_column("x"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_columns_are_one(name):
    first, second = MAKERS[name](), MAKERS[name]()
    assert first is not second and {first, second} == {first}


def test_all_columns_differ():
    columns = [make() for make in MAKERS.values()]
    assert len(set(columns)) == len(columns)


@pytest.mark.parametrize(("column", "text"), [
    (X, "NumericColumn(key='x', shape=(1,), default_value=None, dtype='float32', normalizer_fn=None)"),
    (COLOR, "VocabularyListColumn(key='color', vocabulary_list=('red', 'green'), dtype='string', default_value=-1, "
            "num_oov_buckets=0)"),
    (fc.categorical_column_with_vocabulary_list("n", range(20)),
     "VocabularyListColumn(key='n', vocabulary_list=(0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)), dtype='int64', "
     "default_value=-1, num_oov_buckets=0)"),
])
def test_a_column_shows_what_it_is(column, text):
    assert repr(column) == text


@pytest.mark.parametrize(("column", "name"), [
    (X, "x"), (fc.bucketized_column(X, [1]), "x_bucketized"), (COLOR, "color"),
    (fc.crossed_column(["b", COLOR, fc.bucketized_column(X, [1])], 5), "b_X_color_X_x_bucketized"),
    (fc.weighted_categorical_column(COLOR, "w"), "color_weighted_by_w"),
    (fc.indicator_column(COLOR), "color_indicator"),
    (fc.embedding_column(COLOR, 2), "color_embedding"), (fc.shared_embeddings([COLOR], 2)[0], "color_shared_embedding"),
    (fc.indicator_column(SEQUENCE), "watched_indicator"),
])
def test_columns_have_tensorflows_names(column, name):
    assert column.name == name


def test_a_dtype_may_be_given_in_many_ways():
    class TensorFlows:
        name = "string"

    hashed = [fc.categorical_column_with_hash_bucket("n", 5, dtype) for dtype in ("string", str, bytes, TensorFlows())]
    assert {column.dtype for column in hashed} == {"string"}
    assert fc.categorical_column_with_hash_bucket("n", 5, np.int32).dtype == "int32"


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: fc.numeric_column(3), TypeError, "`key` must be the key of a feature, a str"),
    (lambda: fc.numeric_column(""), ValueError, "`key` must be the key of a feature. Received: an empty one"),
    (lambda: fc.numeric_column("x", shape=0), ValueError, "`shape` must be a whole number of at least 1"),
    (lambda: fc.numeric_column("x", shape=1.5), TypeError, "`shape` must be a whole number"),
    (lambda: fc.numeric_column("x", dtype="string"), ValueError, "`dtype` must be a type of whole or real numbers"),
    (lambda: fc.numeric_column("x", dtype="no type"), TypeError, "`dtype` must be the dtype of a feature"),
    (lambda: fc.numeric_column("x", default_value="a"), TypeError, "`default_value` must be a number"),
    (lambda: fc.numeric_column("x", default_value=[1, 2]), ValueError, r"numbers of the column's shape \(1,\)"),
    (lambda: fc.numeric_column("x", normalizer_fn=3), TypeError, "`normalizer_fn` must be a function"),
    (lambda: fc.bucketized_column(X, 3), TypeError, "`boundaries` must be a list"),
    (lambda: fc.categorical_column_with_vocabulary_list("c", "red"), TypeError, "`vocabulary_list` must be a list"),
    (lambda: fc.categorical_column_with_vocabulary_list("c", ["a", 1]), TypeError, "all strings or all whole numbers"),
    (lambda: fc.categorical_column_with_vocabulary_list("c", ["a"], dtype="int64"), ValueError,
     "`dtype` must match the vocabulary, 'string'. Received: dtype='int64'"),
    (lambda: fc.categorical_column_with_vocabulary_list("c", ["a"], default_value=1), ValueError,
     "`default_value` must be an id of the vocabulary, from 0 to 0, or -1. Received: default_value=1"),
    (lambda: fc.categorical_column_with_vocabulary_list("c", ["a"], num_oov_buckets=-1), ValueError,
     "`num_oov_buckets` must be a whole number of at least 0"),
    (lambda: fc.categorical_column_with_vocabulary_file("c", ""), ValueError, "`vocabulary_file` must be the path"),
    (lambda: fc.categorical_column_with_vocabulary_file("c", "w.tfrecord.gz"), ValueError, "must be None or 'text'"),
    (lambda: fc.categorical_column_with_hash_bucket("c", 2**31), ValueError, "from 1 to 2147483647. Received"),
    (lambda: fc.categorical_column_with_hash_bucket("c", 5, "float32"), ValueError, "'string' or an integer type"),
    (lambda: fc.categorical_column_with_identity("c", 5, -1), ValueError, "`default_value` must be a whole number of"),
    (lambda: fc.crossed_column("ab", 5), TypeError, "`keys` must be a list of keys and categorical columns"),
    (lambda: fc.crossed_column([SEQUENCE, "a"], 5), ValueError, "'watched' cannot be crossed"),
    (lambda: fc.weighted_categorical_column(SEQUENCE, "w"), ValueError, "'watched' cannot be weighted"),
    (lambda: fc.weighted_categorical_column(X, "w"), TypeError, "`categorical_column` must be a categorical column"),
    (lambda: fc.weighted_categorical_column(COLOR, "w", "string"), ValueError, "`dtype` must be a type of whole"),
    (lambda: fc.indicator_column(X), TypeError, "`categorical_column` must be a categorical column"),
    (lambda: fc.indicator_column("color"), TypeError, "Received: a value of type str"),
    (lambda: fc.embedding_column(COLOR, 2, initializer=3), TypeError, "`initializer` must be a function"),
    (lambda: fc.embedding_column(COLOR, 2, max_norm=0), ValueError, "`max_norm` must be a number above 0"),
    (lambda: fc.embedding_column(COLOR, 2, trainable=1), TypeError, "`trainable` must be True or False"),
    (lambda: fc.shared_embeddings(COLOR, 2), TypeError, "`categorical_columns` must be a list"),
    (lambda: fc.shared_embeddings([], 2), ValueError, "`categorical_columns` must have at least one column"),
    (lambda: fc.sequence_numeric_column("x", default_value=None), TypeError, "`default_value` must be a number"),
])
def test_what_describes_nothing_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
