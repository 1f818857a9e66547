"""Helpers for arrays, beside Keras's on generated inputs."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainer import utils

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")  # the one that needs no further package
    keras_utils = pytest.importorskip("keras").utils


@pytest.mark.slow
@given(labels=hnp.arrays(st.sampled_from(["int32", "int64", "uint8", "float32"]),
                         hnp.array_shapes(max_dims=3, max_side=4), elements=st.integers(0, 5)),
       extra=st.none() | st.integers(0, 3))
def test_one_hot_vectors_are_kerass(labels, extra):
    num_classes = None if extra is None else int(labels.max()) + 1 + extra
    found, expected = (module.to_categorical(labels, num_classes) for module in (utils, keras_utils))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.slow
@given(values=hnp.arrays(st.sampled_from(["float32", "float64"]), (3, 4),
                         elements=st.floats(-100, 100, width=32)),
       axis=st.sampled_from([-1, 0, 1]), order=st.sampled_from([1, 2, 3, np.inf]))
def test_scaled_vectors_are_kerass(values, axis, order):
    if axis == 0:
        expected = keras_utils.normalize(values.T, -1, order).T  # Keras takes axis 0 for the last one
    else:
        expected = keras_utils.normalize(values, axis, order)
    np.testing.assert_allclose(utils.normalize(values, axis, order), expected, rtol=1e-6)


@pytest.mark.slow
@given(sequences=st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=4),
       maxlen=st.none() | st.integers(1, 6), ends=st.tuples(*[st.sampled_from(["pre", "post"])] * 2),
       dtype=st.sampled_from(["int32", "float32"]), value=st.integers(-2, 2))
def test_padded_sequences_are_kerass(sequences, maxlen, ends, dtype, value):
    arguments = {"maxlen": maxlen, "dtype": dtype, "padding": ends[0], "truncating": ends[1], "value": value}
    found, expected = (module.pad_sequences(sequences, **arguments) for module in (utils, keras_utils))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


def test_vectors_and_strings_are_padded_too():
    vectors = [np.ones((1, 2)), np.ones((3, 2))]
    np.testing.assert_array_equal(utils.pad_sequences(vectors), keras_utils.pad_sequences(vectors))
    assert utils.pad_sequences([["a"], ["b", "c"]], dtype=object, value="").tolist() == [["", "a"], ["b", "c"]]


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: utils.to_categorical([0, 3], 3), ValueError, "from 0 to 2. Received: indices from 0 to 3"),
    (lambda: utils.to_categorical([-1, 1]), ValueError, "indices from -1 to 1"),
    (lambda: utils.to_categorical([0.5]), ValueError, "class indices"),
    (lambda: utils.to_categorical([]), ValueError, "`num_classes` is needed"),
    (lambda: utils.pad_sequences([[1], 2]), TypeError, "at position 1"),
    (lambda: utils.pad_sequences([[1]], padding="left"), ValueError, "`padding` must be"),
    (lambda: utils.pad_sequences([[1]], value="x"), ValueError, "dtype=object"),
    (lambda: utils.pad_sequences([[[1, 2]], [[1]]]), ValueError, "at position 1"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_fractions_are_not_cut_by_padding():
    with pytest.raises(ValueError, match=r"would cut the fractions .* position 1\. Give `dtype=\"float32\"`"):
        utils.pad_sequences([[1.0], [2.5, 3.0]])
    assert utils.pad_sequences([[1.0], [2.5, 3.0]], dtype="float32").tolist() == [[0.0, 1.0], [2.5, 3.0]]
    assert utils.pad_sequences([[1.0], [2.0, 3.0]]).tolist() == [[0, 1], [2, 3]]
