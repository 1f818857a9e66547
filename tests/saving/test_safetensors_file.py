"""A weights file is whole or not there, holds every dtype bit for bit, and is refused if anything in it is wrong."""

import ast
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import project_files
from trainer.core.tree_paths import named_leaves
from trainer.engine.saving.arrays import file_locks, safetensors_file
from trainer.engine.saving.arrays.safetensors_file import match_arrays, read_arrays, save_arrays

FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
          "float32", "float64", "complex64", *FLOAT8]
U8 = np.dtype("uint8")


def bits_of(dtype: str, count: int = 6) -> np.ndarray:
    """Returns arbitrary bit patterns, NaNs included; only 0 and 1 for bool."""
    if dtype == "bool":
        return np.arange(count) % 2 == 1
    width = np.dtype(dtype).itemsize
    return np.random.default_rng(0).integers(0, 256, count * width, np.uint8).view(dtype)


def read_all(path) -> dict[str, np.ndarray]:
    with read_arrays(path) as arrays:
        return dict(arrays)


def write_file(path, header, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(begin, end, shape=None, dtype="U8") -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(path, dtype):
    array = bits_of(dtype).reshape(2, 3)
    save_arrays(path, {"numpy": array, "jax": jnp.asarray(array) if array.dtype.itemsize < 8 else array})
    for found in read_all(path).values():
        assert (found.shape, found.dtype, found.tobytes()) == ((2, 3), np.dtype(dtype), array.tobytes())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_scalars_and_arrays_without_elements_keep_their_shapes(path, shape):
    save_arrays(path, {"before": np.ones(3, U8), "x": np.ones(shape, np.float32), "none": np.ones((0, 2))})
    found = read_all(path)
    assert found["x"].shape == shape and np.all(found["x"] == 1) and found["none"].shape == (0, 2)


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(3, 2)),
                                   np.arange(12).reshape(3, 4)[::-1, ::2], np.float32(3)])
def test_other_byte_orders_and_layouts_in_memory_are_saved_by_value(path, array):
    save_arrays(path, {"x": array})
    assert np.array_equal(read_all(path)["x"], array)


def test_names_of_a_tree_and_text_beside_them_come_back_in_order(path):
    tree = {"encoder": {"Dense_0": {"kernel": np.ones((2, 2), np.float16)}}, 'größe "x"': np.ones(1)}
    save_arrays(path, named_leaves(tree), {"epoch": "3", "note": "größer\n"})
    with read_arrays(path) as arrays:
        assert list(arrays) == list(named_leaves(tree)) and len(arrays) == 2
        assert arrays.metadata == {"epoch": "3", "note": "größer\n"}
        assert arrays.shapes["encoder/Dense_0/kernel"] == ((2, 2), np.dtype("float16"))


def test_the_library_reads_our_files(path):
    arrays = {f"x/{dtype}": bits_of(dtype).reshape(3, 2) for dtype in DTYPES if dtype not in FLOAT8}
    save_arrays(path, {**arrays, "scalar": np.float64(2), "none": np.ones((0, 3))}, {"epoch": "3"})
    found = safetensors.numpy.load_file(path)
    for name, x in arrays.items():
        assert (found[name].dtype, found[name].shape, found[name].tobytes()) == (x.dtype, x.shape, x.tobytes())
    assert found["scalar"].shape == () and found["none"].shape == (0, 3)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"epoch": "3"}
    save_arrays(path, {})
    assert safetensors.numpy.load_file(path) == read_all(path) == {}


@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_library_reads_our_float8_as_bytes(path, dtype):  # its NumPy side has no such dtypes
    save_arrays(path, {"x": bits_of(dtype)})
    [(name, found)] = safetensors.deserialize(path.read_bytes())
    ours = safetensors.TensorSpec(dtype=dtype, shape=[6], data_ptr=0, data_len=6)
    assert (name, found["dtype"], bytes(found["data"])) == ("x", ours.dtype, bits_of(dtype).tobytes())


def test_we_read_the_librarys_files(path):
    arrays = {f"x/{dtype}": bits_of(dtype).reshape(3, 2) for dtype in DTYPES}
    safetensors.numpy.save_file({**arrays, "scalar": np.array(2.0), "none": np.ones((0, 3))}, path, {"epoch": "3"})
    with read_arrays(path) as file:
        assert file.metadata == {"epoch": "3"}
        for name, x in arrays.items():
            assert (file[name].dtype, file[name].shape, file[name].tobytes()) == (x.dtype, x.shape, x.tobytes())
        assert file["scalar"] == 2 and file["scalar"].shape == () and file["none"].shape == (0, 3)


def test_every_array_starts_at_a_multiple_of_its_items_size(path):
    save_arrays(path, {"odd": np.ones(3, np.int8), "half": np.ones(1, np.float16), "wide": np.ones(1)})
    with read_arrays(path) as arrays:
        starts = {name: arrays._data_start + begin for name, (begin, _) in arrays._offsets.items()}
    assert starts["wide"] % 8 == 0 and starts["half"] % 2 == 0


@pytest.mark.parametrize("spec", [P("rows"), P(None, "rows"), P()])
def test_arrays_over_several_devices_are_saved_whole(path, devices, spec):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_arrays(path, {"x": jax.device_put(values, NamedSharding(Mesh(np.array(devices), "rows"), spec))})
    assert np.array_equal(read_all(path)["x"], values)


def test_arrays_on_devices_pass_through_host_memory_and_do_not_stay_there(path, devices, monkeypatch):
    sharding = NamedSharding(Mesh(np.array(devices), "rows"), P("rows"))
    arrays = {f"x{i}": jax.device_put(np.full(8, i, np.float32), sharding) for i in range(6)}
    fetched, alive, fetch = [], [], safetensors_file._fetch

    def watched(array):
        alive.append(sum(held() is not None for held in fetched))
        host = fetch(array)
        fetched.append(weakref.ref(host))
        return host

    monkeypatch.setattr(safetensors_file, "_fetch", watched)
    gc.disable()  # so that nothing is freed by chance
    try:
        save_arrays(path, arrays)
        # JAX may let one go a moment late. Its own fetch would have kept each for as long as its array lives.
        assert len(alive) == 6 and max(alive) <= 2
    finally:
        gc.enable()


def test_each_array_is_read_when_it_is_asked_for(path):
    save_arrays(path, {"a": np.zeros(4, U8), "b": np.zeros(4, U8)})
    with read_arrays(path) as arrays:
        with open(path, "r+b") as file:  # in place, as no save would
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        assert arrays["b"].tolist() == [1, 2, 3, 4]
        os.truncate(path, os.path.getsize(path) - 2)
        assert "b" in arrays and arrays["a"].tolist() == [0] * 4
        with pytest.raises(ValueError, match="was cut short while it was open: 'b' cannot be read"):
            arrays["b"]


def test_an_open_file_is_not_changed_by_a_save_over_it(path):
    save_arrays(path, {"a": np.zeros(4)})
    with read_arrays(path) as arrays:
        save_arrays(path, {"b": np.ones(9)})
        first = arrays["a"]
        first += 1  # the caller's own
        assert arrays["a"].tolist() == [0] * 4
    assert list(read_all(path)) == ["b"] and first.tolist() == [1] * 4


def test_a_closed_file_and_an_unknown_name_are_errors(path):
    save_arrays(path, {"up/kernel": np.zeros(1)})
    with read_arrays(path) as arrays:
        with pytest.raises(KeyError, match=r"has no array 'up/kernal'\. Did you mean 'up/kernel'"):
            arrays["up/kernal"]
        assert arrays.get("other") is None
    with pytest.raises(ValueError, match="closed file"):
        arrays["up/kernel"]


@pytest.mark.parametrize(("name", "array", "message"), [
    ("up/x", np.zeros(2, np.complex128), "'up/x' has the dtype complex128, which a safetensors file cannot hold"),
    ("up/x", np.array(["text"]), "'up/x' has the dtype <U4"),
    ("up/x", np.array([object()]), "'up/x' has the dtype object"),
    ("up/x", np.zeros(2, jnp.int4), "'up/x' has the dtype int4"),
    ("up/x", jax.random.key(0), r"'up/x' has the dtype key<fry>.*Save `jax\.random\.key_data` of it"),
    ("__metadata__", np.zeros(1), "No array can have the name '__metadata__'"),
])
def test_a_dtype_or_name_that_the_format_lacks_is_refused_by_name(path, name, array, message):
    with pytest.raises(ValueError, match=message):
        save_arrays(path, {"fine": np.zeros(1), name: array})
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(("arrays", "metadata", "message"), [
    ({"x": [1.0]}, None, r"`arrays\['x'\]` must be a JAX or NumPy array. Received: a value of type list"),
    ({3: np.zeros(1)}, None, "`arrays` must be a mapping from names, which are strings, to arrays"),
    ({}, {"epoch": 3}, "`metadata` must map strings to strings"),
])
def test_other_types_are_refused(path, arrays, metadata, message):
    with pytest.raises(TypeError, match=message):
        save_arrays(path, arrays, metadata)


def test_an_array_split_over_processes_is_refused(path, monkeypatch):
    array = jnp.zeros(3)
    monkeypatch.setattr(type(array), "is_fully_addressable", property(lambda self: False))
    save_arrays(path, {"whole here": array})
    monkeypatch.setattr(type(array), "is_fully_replicated", property(lambda self: False))
    with pytest.raises(ValueError, match=r"'x' is split over several processes.*process_allgather"):
        save_arrays(path, {"x": array})


def test_a_folder_in_the_files_place_and_a_missing_folder_or_file_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError, match=r"is a folder\. Give the name of a file"):
        save_arrays(tmp_path, {})
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nowhere'\. Make it first"):
        save_arrays(tmp_path / "nowhere" / "weights.safetensors", {})


class FullDisk(io.FileIO):
    space = 0  # bytes

    def write(self, data):
        if super().write(bytes(data)[:max(self.space - self.tell(), 0)]) < len(data):
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("space", [0, 4, 200, 100_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(path, monkeypatch, space):
    save_arrays(path, {"old": np.arange(5)})
    with monkeypatch.context() as patch:
        patch.setattr(FullDisk, "space", space)
        patch.setattr(safetensors_file, "open", FullDisk, raising=False)
        with pytest.raises(OSError, match=rf"No space left.*{path.name}"):
            save_arrays(path, {"new": np.zeros(100_000)})
    assert os.listdir(path.parent) == [path.name] and read_all(path)["old"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (os, "replace"), (safetensors_file, "_fetch")])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_or_ctrl_c_on_the_way_leaves_the_old_file_and_nothing_else(path, monkeypatch, owner, name, error):
    save_arrays(path, {"old": np.arange(5)})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, mock.Mock(side_effect=error("planned")))
        with pytest.raises(error, match="planned"):
            save_arrays(path, {"new": np.zeros(9)})
    assert os.listdir(path.parent) == [path.name] and list(read_all(path)) == ["old"]


def test_the_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after(path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append((old, new)), replace(old, new)))
    save_arrays(path, {"x": np.zeros(9)})
    assert calls == [calls[0], (calls[0], str(path)), str(path.parent)]


def test_what_a_link_points_to_is_replaced(path, tmp_path):
    path.symlink_to(tmp_path / "real")
    save_arrays(path, {"x": np.zeros(1)})
    assert path.is_symlink() and list(read_all(tmp_path / "real")) == ["x"]


SAVE_THAT_STOPS_IN_THE_MIDDLE = """
import sys, time
import numpy as np
from trainer.engine.saving.arrays.safetensors_file import save_arrays

class Stops:
    shape, dtype = (4,), np.dtype("float64")
    def __array__(self, *unused, **also_unused):
        print("in the middle", flush=True)
        time.sleep(60)

save_arrays(sys.argv[1], {"new": np.ones(100_000), "later": Stops()})
"""


def test_leftovers_of_killed_saves_go_with_the_next_save_and_those_under_way_stay(path):
    old, others = time.time() - 60, [".weights.safetensors.tmp", ".weights_safetensors.0123456789ab.tmp", "notes"]
    killed, running = (path.with_name(f".weights.safetensors.{digit * 12}.tmp") for digit in "01")
    for file in (killed, running, *map(path.with_name, others)):
        file.write_bytes(b"")
        os.utime(file, (old, old))
    with running.open("rb") as file:
        assert file_locks.lock(file.fileno())
        save_arrays(path, {"x": np.ones(1)})
    assert {file.name for file in path.parent.iterdir()} == {path.name, running.name, *others}


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_file_whole(path):
    save_arrays(path, {"old": np.arange(5)})
    with subprocess.Popen([sys.executable, "-c", SAVE_THAT_STOPS_IN_THE_MIDDLE, str(path)], stdout=subprocess.PIPE,
                          cwd=project_files.ROOT) as process:
        assert process.stdout.readline() == b"in the middle\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    [left] = [file for file in path.parent.iterdir() if file != path]
    assert left.name.startswith(".weights.safetensors.") and left.stat().st_size >= 800_000
    assert read_all(path)["old"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="is cut short"):
        read_arrays(left)
    os.utime(left, (time.time() - 60,) * 2)
    save_arrays(path, {"new": np.arange(2)})
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("header", "data", "message"), [
    ({"x": entry(0, 4), "y": entry(2, 6)}, 6, "'y' starts at byte 2, the array before it ends at byte 4: they overlap"),
    ({"x": entry(0, 4), "y": entry(5, 6)}, 6, "'y' starts at byte 5, .* ends at byte 4: they leave a gap"),
    ({"x": entry(2, 6)}, 6, "'x' starts at byte 2, .* ends at byte 0: they leave a gap"),
    ({"x": entry(0, 9)}, 6, r"is cut short: its header describes \d+ bytes, it has \d+"),
    ({"x": entry(0, 4)}, 6, "is too long: its header describes"),
    ({"x": entry(0, 6, [2])}, 6, r"'x' has 6 bytes, which its shape \(2,\) of uint8 does not fill"),
    ({"x": entry(0, 6, [2], "F32")}, 6, r"'x' has 6 bytes, which its shape \(2,\) of float32 does not fill"),
    ({"x": entry(6, 0, [])}, 6, "'x' has -6 bytes"),
    ({"x": entry(-6, 0, [6])}, 6, "'x' has a shape or offsets that are not whole numbers"),
    ({"x": entry(0, 6, [-2, -3])}, 6, "'x' has a shape or offsets that are not whole numbers"),
    ({"x": entry(0, 6, [6.0])}, 6, "'x' has a shape or offsets that are not whole numbers"),
    ({"x": entry(0, 0, [2**62, 2**62])}, 0, "'x' has 0 bytes"),
    ({"x": {**entry(0, 6), "data_offsets": [0, 3, 6]}}, 6, "'x' has a shape or offsets that are not whole numbers"),
    ({"x": entry(0, 6, dtype="F99")}, 6, "'x' has the dtype 'F99', which is not one of BOOL, U8"),
    ({"x": {"dtype": "U8"}}, 6, "'x' lacks a dtype, a shape or offsets"),
    ({"__metadata__": {"epoch": 3}}, 0, "its metadata does not map strings to strings"),
    ([], 0, "it is not a JSON object"),
    (b"{}\0", 0, "has no JSON where a header would be"),
    (b'{"\xff": 1}', 0, "has no JSON where a header would be"),
    (b"[" * 200_000, 0, "has no JSON where a header would be"),
    (b'{"n": ' + b"9" * 5000 + b"}", 0, "has no JSON where a header would be"),
])
def test_a_header_that_contradicts_itself_or_the_file_is_refused(path, header, data, message):
    write_file(path, header, b"\0" * data)
    with pytest.raises(ValueError, match=message):
        read_arrays(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, framework="numpy")


@pytest.mark.parametrize("twice", [b'{"x": %s, "x": %s}', b'{"a": %s, "x": {"x": 1, "x": %s}}'])
def test_a_name_that_is_there_twice_is_refused(path, twice):
    one = json.dumps(entry(0, 3)).encode()
    write_file(path, twice % (one, one), b"123")
    with pytest.raises(ValueError, match="damaged header: the name 'x' is there twice"):
        read_arrays(path)


@pytest.mark.parametrize("content", [b"", b"short", b"\x80\x04\x95\x0b" + b"\0" * 40, b"PK\x03\x04" + b"a zip" * 9])
def test_other_files_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a safetensors file(: its first 8|, or was cut short: it has \d)"):
        read_arrays(path)


def test_a_file_cut_short_anywhere_is_refused(path):
    save_arrays(path, {"up/kernel": np.ones((2, 3)), "up/bias": np.ones(3, np.int8)}, {"epoch": "3"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"weights\.safetensors"):
            read_arrays(path)


@pytest.mark.slow
def test_a_flipped_bit_in_the_header_is_refused_wherever_the_library_refuses_it(path):
    save_arrays(path, {"up/kernel": np.ones((2, 3)), "up/bias": np.ones(3, np.int8)}, {"epoch": "3"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for bit in range(8 * header):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                known = set(file.keys())
        except safetensors.SafetensorError:
            refused += 1
            with pytest.raises(ValueError, match=r"weights\.safetensors"):
                read_arrays(path)
        else:  # a flip within a name or a text
            assert set(read_all(path)) == known
    assert refused > 4 * header


def specs(**shapes):
    return {name.replace("__", "/"): (shape, np.dtype("float32")) for name, shape in shapes.items()}


def test_a_match_tells_apart_what_is_missing_unexpected_and_of_another_shape():
    report = match_arrays(specs(up__kernel=(2, 3), up__bias=(3,), old__bias=(1,)),
                          specs(up__bias=(3,), up__kernel=(2, 4), new__bias=(1,)))
    float32 = np.dtype("float32")
    assert (report.matched, report.missing, report.unexpected, report.skipped) == (
        ("up/bias",), ("new/bias",), ("old/bias",), ())
    assert report.mismatched == {"up/kernel": (((2, 3), float32), ((2, 4), float32))}
    assert str(report).splitlines() == [
        "1 array matches.", "1 missing from the file: new/bias (near: old/bias)",
        "1 not in the model: old/bias (near: new/bias)",
        "1 of another shape or kind of dtype: up/kernel (file: float32(2, 3), model: float32(2, 4))"]


def test_patterns_select_among_the_names_of_both_sides():
    report = match_arrays(specs(encoder__kernel=(2,), encoder__old=(1,), old_head__kernel=(5,)),
                          specs(encoder__kernel=(2,), head__kernel=(3,)), ["encoder"])
    assert report.matched == ("encoder/kernel",) and report.unexpected == ("encoder/old",)
    assert report.missing == () and report.skipped == ("head/kernel", "old_head/kernel")
    assert str(report).endswith("2 selected by no pattern: head/kernel, old_head/kernel")


@pytest.mark.parametrize(("patterns", "error", "message"), [
    (["encodr"], ValueError, r"`patterns` has the pattern 'encodr', which matches none.*Did you mean 'encoder'"),
    (["only_in_file"], ValueError, "which matches none"),
    (["("], ValueError, "not a valid regular expression"),
    ([], ValueError, "`patterns` is empty, which would load nothing. Pass None"),
    ("encoder", TypeError, "must be a list of path patterns"),
])
def test_patterns_that_select_nothing_are_errors(patterns, error, message):
    with pytest.raises(error, match=message):
        match_arrays(specs(encoder__kernel=(2,), only_in_file=(1,)), specs(encoder__kernel=(2,)), patterns)


@pytest.mark.parametrize(("found", "wanted", "fits"), [
    ("float32", jnp.bfloat16, True), ("float8_e4m3fn", "float32", True), ("int32", "int8", True),
    ("uint32", "int32", False), ("float32", "int32", False), ("bool", "uint8", False), ("complex64", "float32", False),
    ("uint32", jax.random.key(0).dtype, False),
])
def test_dtypes_match_if_they_are_of_one_kind(found, wanted, fits):
    report = match_arrays({"x": ((2,), np.dtype(found))}, {"x": ((2,), wanted)})
    assert (report.matched, tuple(report.mismatched)) == ((("x",), ()) if fits else ((), ("x",)))


def test_an_incomplete_match_is_an_error_unless_partial():
    report = match_arrays(specs(up=(2,), dwn=(2,)), specs(up=(2,), down=(2,)))
    with pytest.raises(ValueError, match=r"do not fit the model\. 1 array matches\.\n1 missing from the file: down "
                                         r"\(near: dwn\)\n1 not in the model: dwn \(near: down\)\nPass `partial=True`"):
        report.raise_unless_complete()
    report.raise_unless_complete(partial=True)
    match_arrays(specs(up=(2,)), specs(up=(2,))).raise_unless_complete()


def test_a_partial_match_of_nothing_or_of_other_shapes_is_an_error():
    with pytest.raises(ValueError, match="0 arrays match") as caught:
        match_arrays(specs(a=(2,)), specs(b=(2,))).raise_unless_complete(partial=True)
    assert "Pass" not in str(caught.value)
    with pytest.raises(ValueError, match=r"b \(file: float32\(2,\), model: float32\(3,\)\)\nTo leave out .*, pass "):
        match_arrays(specs(a=(2,), b=(2,)), specs(a=(2,), b=(3,))).raise_unless_complete(partial=True)


@pytest.mark.parametrize(("there", "wanted", "partial"), [
    ({"body__kernel": (2,), "head__kernel": (2, 9), "head__bias": (9,)},
     {"body__kernel": (2,), "head__kernel": (2, 5), "head__bias": (5,)}, False),
    ({"body": (2,), "head__norm__mean": (9,), "head__kernel": (9,), "old": (1,)},
     {"body": (2,), "head__norm__mean": (5,), "head__kernel": (5,), "new": (1,)}, True),
    ({"body": (2,), "head-1.0__kernel": (9,), "head-110__kernel": (4,)},
     {"body": (2,), "head-1.0__kernel": (5,), "head-110__kernel": (4,)}, False)])
def test_the_patterns_of_the_message_load_all_but_the_layers_of_other_shapes(there, wanted, partial):
    there, wanted = specs(**there), specs(**wanted)
    report = match_arrays(there, wanted)
    with pytest.raises(ValueError, match="do not fit the model") as caught:
        report.raise_unless_complete()
    hint = str(caught.value).splitlines()[-1]
    arguments = re.search(r"`patterns=(\[.*\])`( and `partial=True`)?\.$", hint)
    assert bool(arguments[2]) is partial
    selected = match_arrays(there, wanted, ast.literal_eval(arguments[1]))
    selected.raise_unless_complete(partial)
    assert selected.matched == report.matched


def test_no_pattern_is_recommended_for_many_layers_or_without_the_argument():
    there, wanted = ({"same": (1,), **{f"layer_{i}": (size,) for i in range(4)}} for size in (2, 3))
    with pytest.raises(ValueError, match="Pass `patterns=`, regular"):
        match_arrays(specs(**there), specs(**wanted)).raise_unless_complete()
    with pytest.raises(ValueError, match="Select fewer by `patterns`"):
        match_arrays(specs(**there), specs(**wanted), ["same", "layer_1"]).raise_unless_complete()
    with pytest.raises(ValueError) as caught:
        match_arrays(specs(**there), specs(**wanted)).raise_unless_complete(partial=None)
    assert "patterns" not in str(caught.value)


def test_a_message_lists_a_few_names_only():
    report = match_arrays({}, {f"layer_{i}": ((1,), U8) for i in range(20)})
    assert str(report).endswith("20 missing from the file: " + ", ".join(f"layer_{i}" for i in range(8)) + ", ...")


