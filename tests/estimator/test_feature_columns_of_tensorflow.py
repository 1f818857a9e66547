"""Feature columns have TensorFlow's numbers: ids, dense inputs, linear models and sequences, each behaviour by name."""

import jax
import numpy as np
import pytest

from tests.support.feature_column_cases import REFERENCE, arrays, made, made_columns, nested, our_path
from trainer.core.categories.fingerprints import fingerprint64
from trainer.estimator.feature_columns import DenseFeatures, HostTransform, LinearFeatures, SequenceFeatures
from trainer.estimator.feature_columns.values.raw_features import RawFeatures


def behaviours(section):
    return [pytest.param(case, id=case["behaviour"]) for case in REFERENCE[section]]


def given(case, folder):
    """Returns a case's columns, and what the device gets of its features."""
    columns = made_columns(case["columns"], folder)
    return columns, HostTransform(columns)(arrays(case["features"]))


def assert_close(ours, tensorflows):
    np.testing.assert_allclose(ours, np.array(tensorflows), rtol=1e-6, atol=1e-6)


def test_there_are_many_behaviours():
    names = [case["behaviour"] for section in ("ids", "dense", "linear", "sequence", "errors")
             for case in REFERENCE[section]]
    assert len(names) == len(set(names)) >= 100


@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{len(case['text'].encode())} bytes: {case['text'][:10]}") for case in REFERENCE["hashes"]])
def test_a_word_has_tensorflows_hash(case):
    number = int(fingerprint64([case["text"].encode()])[0])
    assert [number % buckets for buckets in REFERENCE["hash_buckets"]] == case["ids"]


def test_all_words_at_once_have_tensorflows_hashes():
    numbers = fingerprint64([case["text"].encode() for case in REFERENCE["hashes"]])
    buckets = np.array(REFERENCE["hash_buckets"], np.uint64)
    np.testing.assert_array_equal(numbers[:, None] % buckets, [case["ids"] for case in REFERENCE["hashes"]])


@pytest.mark.parametrize("case", behaviours("ids"))
def test_a_categorical_column_has_tensorflows_ids(case, tmp_path):
    column = made(case["column"], tmp_path)
    ours = column.host_ids(RawFeatures(arrays(case["features"])))
    # TensorFlow puts what is present first; here it stays in its place.
    assert [[number for number in row if number >= 0] for row in ours.tolist()] == [
        [number for number in row if number >= 0] for row in case["ids"]]
    assert ours.max() < column.num_buckets


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("case", behaviours("ids"))
def test_the_device_gets_the_same_ids(case, tmp_path):
    column = made(case["column"], tmp_path)
    raw = arrays(case["features"])
    ids, _ = column.ids_and_weights(HostTransform([column])(raw))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.maximum(column.host_ids(RawFeatures(raw)), -1))


@pytest.mark.sampled
@pytest.mark.parametrize("case", behaviours("dense"))
def test_dense_features_are_tensorflows(case, tmp_path):
    columns, features = given(case, tmp_path)
    params = nested({our_path(path): value for path, value in case["weights"].items()})
    ours = jax.jit(DenseFeatures(columns).apply)({"params": params}, features)
    assert ours.dtype == np.float32
    assert_close(ours, case["outputs"][0])


@pytest.mark.slow
@pytest.mark.parametrize("case", behaviours("linear"))
def test_linear_features_are_tensorflows(case, tmp_path):
    columns, features = given(case, tmp_path)
    names = {path: our_path(path) for path in case["weights"]}
    names = {path: "bias" if path.endswith("bias_weights") else name for path, name in names.items()}
    names = {path: f"embeddings/{name}" if name.endswith("/embedding") else name for path, name in names.items()}
    params = nested({names[path]: value for path, value in case["weights"].items()})
    module = LinearFeatures(columns, case["units"], case["sparse_combiner"])
    assert jax.tree.map(np.shape, module.init(jax.random.key(0), features)["params"]) == jax.tree.map(np.shape, params)
    assert_close(module.apply({"params": params}, features), case["outputs"][0])


@pytest.mark.parametrize("case", behaviours("sequence"))
def test_sequence_features_are_tensorflows(case, tmp_path):
    columns, features = given(case, tmp_path)
    params = nested({our_path(path): value for path, value in case["weights"].items()})
    x, lengths = jax.jit(SequenceFeatures(columns).apply)({"params": params}, features)
    assert_close(x, case["outputs"][0])
    assert lengths.tolist() == case["outputs"][1]


# What the messages here say where TensorFlow raises ValueError, and the type.
MESSAGES = {
    "a categorical column in DenseFeatures": (
        ValueError, "Column 'color' is categorical.*wrap a categorical column with an `embedding_column` or `"),
    "a missing feature": (ValueError, "The features have no 'x'. Known names: y"),
    "two columns of one name": (ValueError, "Two columns have the name 'x'"),
    "no columns": (ValueError, "`columns` must have at least one feature column. Received: none"),
    "what is no column": (TypeError, "`columns` must be a sequence of feature columns. Received: a value of type str"),
    "an indicator of sequences in DenseFeatures": (ValueError, "'watched_indicator' is of sequences.*SequenceFeatures"),
    "boundaries that do not ascend": (ValueError, "`boundaries` must be a list of ascending numbers. Received: 2"),
    "no boundaries": (ValueError, "`boundaries` must be a list of ascending numbers. Received: 0"),
    "buckets of what is not numeric": (TypeError, "`source_column` must be what `numeric_column` makes"),
    "buckets of several axes": (ValueError, r"`source_column` must have one axis. Received: 'x' of shape \(2, 2\)"),
    "an empty vocabulary": (ValueError, "`vocabulary_list` must have words, and none twice. Received: 0 words"),
    "a vocabulary with a word twice": (ValueError, "none twice. Received: 2 words, 1 of them different"),
    "a default value beside buckets": (ValueError, "Only one of `default_value` and `num_oov_buckets` can be set"),
    "words for a column of whole numbers": (
        ValueError, r"Column 'color' has dtype 'int64', and feature 'color' holds strings.*astype\(int\)"),
    "no vocabulary file": (ValueError, "There is no vocabulary file '/no/such/file', for column 'color'"),
    "a default id that is none": (ValueError, "`default_value` must be an id, from 0 to 6. Received: default_value=7"),
    "no buckets": (ValueError, "`num_buckets` must be a whole number from 1 to 2147483647. Received: num_buckets=0"),
    "no hash buckets": (ValueError, "`hash_bucket_size` must be a whole number from 1"),
    "one key crossed": (ValueError, "`keys` must have at least two to cross. Received: 1"),
    "hash buckets crossed": (ValueError, "hash buckets cannot be crossed.*Give the key 'city'"),
    "numbers crossed": (TypeError, r"Received: a value of type NumericColumn. Bucketize a numeric column"),
    "weights crossed": (ValueError, "'words_weighted_by_weights' cannot be crossed"),
    "an embedding of no dimension": (ValueError, "`dimension` must be a whole number of at least 1"),
    "an unknown combiner": (ValueError, "one of 'mean', 'sqrtn', 'sum'. Received: combiner='median'"),
    "shared embeddings of two sizes": (ValueError, "'day', a IdentityColumn with 7, and 'month', a IdentityColumn"),
    "real numbers for ids": (ValueError, "Feature 'day' must hold strings or whole numbers"),
}


@pytest.mark.parametrize("case", behaviours("errors"))
def test_what_tensorflow_refuses_is_refused(case, tmp_path):
    assert case["error"] == "ValueError"
    error, message = MESSAGES[case["behaviour"].removeprefix("error: ")]
    with pytest.raises(error, match=message):  # noqa: PT012 (columns, the transform or the module refuse it)
        columns = made_columns(case["columns"], tmp_path)
        module = DenseFeatures(columns)
        module.init(jax.random.key(0), HostTransform(columns)(arrays(case["features"])))


def test_a_number_out_of_range_is_an_error_where_tensorflow_has_no_bucket():
    _, too_large, negative = REFERENCE["identity out of range"]
    assert not any(too_large) and not any(negative)
    column = made({"call": "categorical_column_with_identity", "args": ["day", 7], "kwargs": {}}, None)
    with pytest.raises(ValueError, match=r"takes values from 0 to 6, and feature 'day' has 7\. Give the column more"):
        HostTransform([column])({"day": [3, 7]})
    assert HostTransform([column])({"day": [3, -2]})["day/identity_7"].tolist() == [[3], [-1]]
