"""Every plain value comes back from JSON and arrays as it was, type and bits; anything else is refused by its path."""

import collections
import enum
import json
import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.core.plain import decode, encode
from trainer.engine.saving.arrays import safetensors_file

DTYPES = ["bool", "int8", "uint8", ">i2", "int64", "uint64", "float16", "bfloat16", "float32", ">f8", "longdouble",
          "complex64", "complex128", "float8_e4m3fn", "int4", "U3", "S5", "V4", "M8[ns]", "m8[D]",
          [("a", "<i4"), ("b", "<f8", (2,))], [("a", [("x", ">u2")]), ("b", "S3")],
          [(("a title", "a"), "<i4"), ("b", "?")]]


def same(first, second) -> bool:
    """Tells whether two values are of the same types and bits all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(map(repr, first)) == list(map(repr, second)) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if type(first) is float:
        return struct.pack(">d", first) == struct.pack(">d", second)
    if isinstance(first, (str, bytes)):
        return list(first) == list(second)  # NumPy's own ignore zeros at their ends in other comparisons
    if isinstance(first, (np.ndarray, np.generic)):
        return (first.shape, first.dtype, first.tobytes()) == (second.shape, second.dtype, second.tobytes())
    return first == second


def after_a_trip(tree, folder=None):
    jsonable, arrays = encode(tree)
    if folder is not None:
        safetensors_file.save_arrays(folder / "arrays", arrays)
        with safetensors_file.read_arrays(folder / "arrays") as file:
            arrays = dict(file)
    return decode(json.loads(json.dumps(jsonable, allow_nan=False)), arrays)


texts = st.text(st.characters(exclude_categories=()))  # with surrogates, which have no UTF-8
scalar_dtypes = hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes() | hnp.array_dtypes()
arrays = hnp.arrays(scalar_dtypes, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2))
leaves = (st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary() | arrays
          | hnp.arrays(scalar_dtypes, ()).map(lambda array: array[()]))
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
                     | st.dictionaries(texts | st.integers(), inner, max_size=3), max_leaves=8)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True)
@given(trees)
def test_any_plain_value_comes_back_as_it_was(tree):
    assert same(after_a_trip(tree), tree)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_arrays_and_scalars_of_every_dtype_come_back_through_a_file(tmp_path, dtype, shape):
    width = np.dtype(dtype).itemsize * max(1, math.prod(shape))
    array = np.frombuffer(bytearray(index % 4 == 0 for index in range(width)), dtype)[:math.prod(shape)].reshape(shape)
    found = after_a_trip({"array": array, "scalars": list(array.reshape(-1)[:2])}, tmp_path)
    assert same(found, {"array": array, "scalars": list(array.reshape(-1)[:2])})
    assert found["array"].flags.writeable


@pytest.mark.parametrize("value", [2**63 - 1, 2**63, -2**63, -2**63 - 1, 10**5000, -0.0, 5e-324, 1e308, math.inf,
                                   -math.inf, math.nan, struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
                                   "\ud800", "\x00", b"\x00\xff", {1: 2, "1": 3}, {}, [], (), ((),), {"dict": 1},
                                   {"tuple": [1]}, {"array": "0"}, np.str_(""), np.str_("a\0"), np.bytes_(b"a\0"),
                                   np.bool_(True)], ids=range(27))
def test_values_at_the_edges_come_back(value):
    assert same(after_a_trip(value), value)


def test_the_order_of_a_dict_is_kept():
    assert list(after_a_trip({"b": 1, "a": 2})) == ["b", "a"]
    assert list(after_a_trip({3: 1, "a": 2, 1: 0})) == [3, "a", 1]


def test_fields_with_gaps_between_them_come_back():
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 24})
    array = np.array([(1, 2.0), (3, 4.0)], dtype)
    found = after_a_trip(array)
    assert found.dtype == dtype and found.tolist() == [(1, 2.0), (3, 4.0)]


def test_a_fortran_array_keeps_its_values():
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert np.array_equal(after_a_trip(array), array)


def test_jax_arrays_come_back_as_numpy(devices):
    sharded = jax.device_put(np.arange(16), NamedSharding(Mesh(np.array(devices), ("d",)), P("d")))
    found = after_a_trip({"sharded": sharded, "scalar": jnp.bfloat16(3)})
    assert same(found, {"sharded": np.arange(16).astype(sharded.dtype), "scalar": np.array(3, jnp.bfloat16)})


def test_later_changes_to_an_array_do_not_reach_what_was_encoded():
    array = np.zeros(3)
    jsonable, copies = encode([array, array.astype(">f8")])
    array[:] = 1
    assert decode(jsonable, copies)[0].tolist() == [0, 0, 0]


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(("value", "message"), [
    ({"a": [1, {2, 3}]}, r"`document\['a'\]\[1\]` is of type set, which a checkpoint cannot hold"),
    ({"a": (1, Point(1, 2))}, r"`document\['a'\]\[1\]` is of type .*Point.* Convert it with `tuple"),
    (collections.OrderedDict(), r"`document` is of type collections.OrderedDict.* Convert it with `dict"),
    ([Color.RED], r"`document\[0\]` is of type .*Color.* Convert it with `int"),
    ({3: 1j}, r"`document\[3\]` is of type complex"),
    ({"a": bytearray(b"x")}, "is of type bytearray"),
    ({"a": len}, "is of type builtin_function_or_method"),
    ({True: 1}, "`document` has the key True of type bool"),
    ({"a": {(1, 2): 1}}, r"`document\['a'\]` has the key \(1, 2\) of type tuple"),
    ([np.array([None])], r"`document\[0\]` has the dtype object, which a checkpoint cannot hold"),
    ([np.ma.zeros(3)], r"is of type numpy.ma.*MaskedArray.* Convert it with `np.array"),
], ids=lambda value: type(value).__name__)
def test_what_cannot_be_restored_exactly_is_refused_by_its_path(value, message):
    with pytest.raises(TypeError, match=message):
        encode(value)


def test_a_random_key_is_refused():
    with pytest.raises(TypeError, match=r"`document\['key'\]` is a random key.*key_data"):
        encode({"key": jax.random.key(0)})


def test_a_value_that_jax_traces_is_refused():
    with pytest.raises(TypeError, match=r"`document\['loss'\]` is a value that JAX is tracing"):
        jax.eval_shape(lambda x: encode({"loss": x}), 1.0)


def test_a_container_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="hold themselves"):
        encode({"loop": loop})


@pytest.mark.parametrize("jsonable", [{"array": "7"}, {"unknown": 1}, {"float": "00"}, {"scalar": ["<f4"]}, {"dict": 3},
                                      {"scalar": ["<f4", "00"]}, {"int": "x"}])
def test_what_was_not_encoded_here_is_refused(jsonable):
    with pytest.raises(ValueError):
        decode(jsonable, {})
