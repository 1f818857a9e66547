"""HostTransform: what the device gets of features as users have them, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.estimator import feature_columns as fc
from trainer.estimator.feature_columns import HostTransform

COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])
DAY = fc.categorical_column_with_identity("day", 7)


def ids(column, values):
    (array,) = HostTransform(column)({column.key: values}).values()
    return array.tolist()


def test_the_device_gets_numbers_of_fixed_shapes_and_no_other_features():
    columns = [COLOR, DAY, fc.numeric_column("x", shape=2), fc.bucketized_column(fc.numeric_column("y"), [0]),
               fc.crossed_column(["color", "day"], 10), fc.weighted_categorical_column(COLOR, "w"),
               fc.indicator_column(COLOR)]
    features = HostTransform(columns)({
        "color": [["red", "blue"], ["", "green"]], "day": np.array([1, 2], np.int8), "x": [[1, 2], [3, 4]],
        "y": np.array([1.0, 2.0]), "w": [[1, 2], [3, 4]], "label": np.array(["a", "b"]), "id": np.array([1, 2])})
    assert {key: (array.dtype.name, array.shape) for key, array in features.items()} == {
        "color/vocabulary_2": ("int32", (2, 2)), "day/identity_7": ("int32", (2, 1)), "x": ("float32", (2, 2)),
        "y": ("float32", (2, 1)), "color_X_day/cross_10": ("int32", (2, 2)),
        "color_weighted_by_w/weights": ("float32", (2, 2))}


@pytest.mark.parametrize("values", [
    ["green", "", "red"], np.array(["green", "", "red"]), np.array([b"green", b"", b"red"]),
    np.array(["green", None, "red"], object), np.array(["green", float("nan"), b"red"], object)])
def test_words_may_come_as_text_bytes_or_objects(values):
    assert ids(COLOR, values) == [[1], [-1], [0]]


@pytest.mark.parametrize("values", [
    [3, -1, 0], np.array([3, -1, 0], np.int8), jnp.array([3, -1, 0]), np.array([3, None, 0], object)])
def test_whole_numbers_may_come_in_any_integer_type(values):
    assert ids(DAY, values) == [[3], [-1], [0]]


def test_whole_arrays_have_the_ids_of_their_batches():
    column, values = fc.categorical_column_with_hash_bucket("city", 100), np.array(["a", "bb", "ccc", "a"])
    assert ids(column, values) == ids(column, values[:2]) + ids(column, values[2:])


def test_numbers_may_be_missing():
    transform = HostTransform([fc.numeric_column("x", default_value=7), fc.numeric_column("y"),
                               fc.numeric_column("z", shape=2, default_value=[1, 2])])
    features = transform({"x": [1.0, np.nan], "y": np.array([None, 2.0], object), "z": [[np.nan, 5], [6, np.nan]]})
    assert features["x"].tolist() == [[1], [7]]
    assert np.isnan(features["y"]).tolist() == [[True], [False]]
    assert features["z"].tolist() == [[1, 5], [6, 2]]


def test_two_kinds_of_ids_of_one_feature_do_not_meet():
    columns = [COLOR, fc.categorical_column_with_hash_bucket("color", 5),
               fc.categorical_column_with_hash_bucket("color", 6)]
    assert sorted(HostTransform(columns)({"color": ["red"]})) == [
        "color/hash_5", "color/hash_6", "color/vocabulary_2"]


def test_a_vocabulary_file_that_has_changed_is_read_again(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"red\r\ngreen\n")
    column = fc.categorical_column_with_vocabulary_file("color", path)
    assert column.num_buckets == 2
    assert ids(column, ["green", "blue"]) == [[1], [-1]]
    path.write_text("blue and\ngreen")
    assert ids(column, ["green", "blue and"]) == [[1], [0]]


def test_a_vocabulary_file_may_hold_whole_numbers(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("10\n-20\n")
    assert ids(fc.categorical_column_with_vocabulary_file("n", path, dtype="int64"), [-20, 10, 3]) == [[1], [0], [-1]]


def test_an_identity_of_words_in_a_cross_leaves_missing_values_out():
    cross = fc.crossed_column([COLOR, DAY], 50)
    features = HostTransform(cross)({"color": ["red", "", "blue"], "day": [1, 1, -1]})
    assert [[number >= 0 for number in row] for row in features["color_X_day/cross_50"].tolist()] == [
        [True], [False], [False]]


@pytest.mark.parametrize(("columns", "features", "message"), [
    ([COLOR], {"colour": ["red"]}, "The features have no 'color'. Did you mean 'colour'?"),
    ([COLOR], {"color": "red"}, r"Feature 'color' has no rows.*Give whole batches, of shape `\(rows,\)`"),
    ([COLOR, DAY], {"color": ["red"], "day": [1, 2]}, "Feature 'day' has 2 rows, and 'color' 1"),
    ([COLOR], {"color": [1]}, r"Column 'color' has dtype 'string', and feature 'color' holds whole.*`astype\(str\)`"),
    ([COLOR], {"color": [[["red"]]]}, r"Column 'color' takes values of shape `\(rows, values\)`. Received: 3 axes"),
    ([COLOR], {"color": np.array(["red", 1], object)}, "of types int, str. Convert it"),
    ([DAY], {"day": [True]}, r"Feature 'day' must hold strings or whole numbers. Received: .*dtype bool"),
    ([DAY], {"day": [8]}, "Column 'day' takes values from 0 to 6, and feature 'day' has 8"),
    ([fc.numeric_column("x")], {"x": ["1.0"]}, "Feature 'x' must hold numbers. Received: .*use a categorical column"),
    ([fc.numeric_column("x")], {"x": np.array(["a", None], object)}, "Feature 'x' must hold numbers"),
    ([fc.numeric_column("x")], {"x": [[1, 2]]}, r"Feature 'x' must have rows of shape \(1,\). Received: .*\(1, 2\)"),
    ([fc.weighted_categorical_column(COLOR, "w")], {"color": ["red"], "w": [[1, 2]]},
     r"Feature 'w' must have a weight for each value of column 'color', of shape \(1, 1\). Received: shape \(1, 2\)"),
    ([fc.sequence_numeric_column("x", shape=2)], {"x": [[1, 2, 3]]}, r"must have time steps of shape \(2,\)"),
    ([fc.sequence_numeric_column("x"), fc.indicator_column(fc.sequence_categorical_column_with_identity("w", 3))],
     {"x": [[1, 2], [1, np.nan]], "w": [[0, 1], [1, 1]]}, "Sequences differ in length: .* in 1 rows, first in row 1"),
])
def test_features_that_do_not_fit_are_refused(columns, features, message):
    with pytest.raises(ValueError, match=message):
        HostTransform(columns)(features)


@pytest.mark.parametrize("features", [np.array(["red"]), ["red"], None])
def test_features_without_names_are_refused(features):
    with pytest.raises(TypeError, match=r"read features by name: give a dict of arrays.*also where there is one"):
        HostTransform(COLOR)(features)


def test_errors_do_not_show_what_features_hold():
    with pytest.raises(ValueError) as caught:
        HostTransform(fc.numeric_column("x"))({"x": ["secret"]})
    assert "secret" not in str(caught.value)


def test_two_different_columns_of_one_name_are_refused():
    other = fc.categorical_column_with_vocabulary_list("color", ["blue", "red"])
    with pytest.raises(ValueError, match="'color' and another would both give the device an array 'color/vocab"):
        HostTransform([COLOR, other])
    with pytest.raises(ValueError, match="would both give the device an array 'x'"):
        HostTransform([fc.numeric_column("x"), fc.numeric_column("x", shape=2)])


def test_a_malformed_vocabulary_file_is_refused(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("red\nred\n")
    with pytest.raises(ValueError, match=r"must have each word once, in 2 lines\. Received: 1 different words"):
        ids(fc.categorical_column_with_vocabulary_file("color", path), ["red"])
    with pytest.raises(ValueError, match="must have one whole number a line, as its column's dtype is 'int64'"):
        ids(fc.categorical_column_with_vocabulary_file("color", path, dtype="int64"), [1])
    with pytest.raises(ValueError, match=r"must have at least 3 lines\. It has 2, for column 'color'"):
        fc.categorical_column_with_vocabulary_file("color", path, 3)
    path.write_text("")
    with pytest.raises(ValueError, match=r"must have at least 1 lines\. It has 0"):
        fc.categorical_column_with_vocabulary_file("color", path)


def test_the_transform_says_what_it_is_for():
    assert repr(HostTransform([COLOR, DAY])) == "HostTransform(['color', 'day'])"
