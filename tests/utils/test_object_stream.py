"""Streams of `pickle`: plain data are read as `pickle` reads them, and nothing that a stream names is run."""

import os
import pickle

import numpy as np
import pytest

from trainer.utils.files import object_stream


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/evil",)


class Recorded:
    pass


PLAIN = [
    [1, 255, 256, 70000, -1, 2**40, -(2**70), 2.5, True, False, None], {"a": [1], "b": {"c": (1, 2, 3, 4)}},
    ((), (1,), (1, 2), [[]] * 2), "text ü", b"bytes", b"x" * 300, "y" * 300, list(range(3000)),
    {"first": np.arange(6, dtype=">i4").reshape(2, 3), "second": np.asfortranarray(np.ones((2, 3))),
     "third": np.array([[1], "a", None], object), "fourth": np.array(["a", "bc"]), "fifth": np.array(2.5)},
    [np.float32(1.5), np.int64(-3)],
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_data_are_read_as_they_were_written(value, protocol):
    found = object_stream.parse(pickle.dumps(value, protocol))
    if isinstance(value, dict) and "first" in value:
        for key, array in value.items():
            np.testing.assert_array_equal(found[key], array)
            theirs = pickle.loads(pickle.dumps(array, protocol))
            assert (found[key].dtype, found[key].strides) == (theirs.dtype, theirs.strides)
    else:
        assert found == value and type(found) is type(value)


def test_streams_of_python_2_are_read():
    # As those of CIFAR begin: byte strings with a length of one byte and of four, and a dtype of a byte string.
    pixels = bytes(range(6))
    stream = (b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x06K\x09eU\x04dataq\x04"
              b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85q\x07U\x01b"
              b"q\x08\x87q\x09Rq\x0a(K\x01K\x02K\x03\x86q\x0bcnumpy\ndtype\nq\x0c"
              b"U\x02u1q\x0dK\x00K\x01\x87q\x0eRq\x0f(K\x03U\x01|q\x10NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x11b"
              b"\x89T\x06\x00\x00\x00" + pixels + b"q\x12tq\x13bu.")
    found = object_stream.parse(stream)
    expected = pickle.loads(stream, encoding="bytes")
    assert found[b"labels"] == expected[b"labels"] == [6, 9]
    np.testing.assert_array_equal(found[b"data"], expected[b"data"])
    assert found[b"data"].dtype == np.uint8


def test_what_is_there_twice_is_one_object():
    array = np.arange(3)
    found = object_stream.parse(pickle.dumps([array, array], 2))
    assert found[0] is found[1] and found[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [Evil(), [Evil()], {"a": Evil()}, np.array([Evil()]), Recorded(), Recorded, print,
                                   eval, getattr, np.random.default_rng(0), np.ma.array([1]), slice(1, 2)])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_objects_that_are_no_plain_data_are_refused(value, protocol):
    with pytest.raises(ValueError, match=r"The stream of objects cannot be read .*it asks for .*Nothing of it was run"):
        object_stream.parse(pickle.dumps(value, protocol))
    assert not os.path.exists("/tmp/evil")


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def call(module, name, *arguments):
    """Returns the instructions that call a global with arguments, themselves instructions."""
    return text(module) + text(name) + b"\x93(" + b"".join(arguments) + b"tR"


TOUCH = text("touch /tmp/evil")
SYSTEM = call("builtins", "getattr", call("builtins", "__import__", text("os")), text("system"))
DTYPE = call("numpy", "dtype", text("V8"))
OBJECTS = call("numpy", "dtype", text("O"))
HOSTILE = {
    "a global of the first protocol": b"cos\nsystem\n(" + TOUCH + b"tR.",
    "a call by class": b"(" + TOUCH + b"ios\nsystem\n.",
    "a call of an object": b"(cos\nsystem\n" + TOUCH + b"o.",
    "a chain of getattr": SYSTEM + b"(" + TOUCH + b"tR.",
    "eval": call("builtins", "eval", text("__import__('os').system('touch /tmp/evil')")) + b".",
    "eval by Python 2's name": b"c__builtin__\neval\n(" + text("1") + b"tR.",
    "a global of a global": call("numpy", "f2py.os.system", TOUCH) + b".",
    "a global of an allowed one": call("numpy", "ndarray.__class__", TOUCH) + b".",
    "a module of an allowed one": call("numpy.core.multiarray", "os.system", TOUCH) + b".",
    "a global with an allowed beginning": call("numpy.dtype", "__init__.__globals__", TOUCH) + b".",
    "a path from the current core": call("numpy._core.multiarray", "numerix.os", TOUCH) + b".",
    "another codec": call("_codecs", "encode", text("x"), text("zip")) + b".",
    "another function of the codecs": call("_codecs", "lookup", text("zip")) + b".",
    "functools.partial": call("functools", "partial", b"cos\nsystem\n") + b".",
    "copyreg": call("copyreg", "_reconstructor", b"cnumpy\nndarray\n", b"cnumpy\nndarray\n", b"N") + b".",
    "a persistent id": b"Pos.system\n.",
    "a persistent id of an object": TOUCH + b"Q.",
    "an extension": b"\x82\x01.",
    "an object by its class": b"cnumpy\nndarray\n)\x81.",
    "an array by its class": b"cnumpy\nndarray\n(K\x01tR.",
    "attributes of a global": b"cnumpy\ndtype\nN}" + text("__defaults__") + b"K\x01s\x86b.",
    "a method of a global in the place of another": b"cnumpy\ndtype\nN}" + text("__func__") + b"K\x01s\x86b.",
    "a dtype of fields": DTYPE + b".",
    "forged fields": call("numpy", "dtype", text("i8")) + b"(K\x03" + text("<") + b"N" + text("a") + b"\x85}"
                     + text("a") + OBJECTS + b"K\x00\x86s" + b"K\x08K\x01K\x00tb.",
    "fields by name": call("numpy", "dtype", text("O,O")) + b".",
    "pointers of objects": call("numpy.core.numeric", "_frombuffer", b"C\x08AAAAAAAA", OBJECTS, b"K\x02\x85",
                                text("C")) + b".",
    "a pointer of an object": call("numpy.core.multiarray", "scalar", OBJECTS, b"C\x08AAAAAAAA") + b".",
    "more rows than bytes": call("numpy.core.numeric", "_frombuffer", b"C\x08AAAAAAAA",
                                 call("numpy", "dtype", text("u1")), b"K\xff\x85", text("C")) + b".",
    "a buffer that is not there": b"\x97.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_streams_are_refused(kind):
    with pytest.raises(ValueError, match=r"(?s)The stream of objects cannot be read .*Nothing of it was run"):
        object_stream.parse(b"\x80\x04" + HOSTILE[kind])
    assert not os.path.exists("/tmp/evil")


def test_what_a_stream_gets_for_a_name_is_not_changed_for_the_next():
    with pytest.raises(ValueError, match="cannot be read"):
        object_stream.parse(b"\x80\x04" + HOSTILE["attributes of a global"])
    assert object_stream.parse(pickle.dumps(np.arange(3))).tolist() == [0, 1, 2]
    assert object_stream._Unpickler._dtype.__defaults__ == (False, False)


def test_a_cut_stream_is_refused():
    whole = pickle.dumps([1, 2, {"a": np.arange(3)}], 2)
    assert object_stream.parse(whole)
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="The stream of objects"):
            object_stream.parse(whole[:end])
