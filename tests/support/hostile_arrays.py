"""Arrays, states and checkpoints that were made to do harm, for `hostile_files.py`."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from tests.support.hostile_contents import (
    BOMB_BYTES,
    CRAFTED,
    ESCAPE,
    SPARSE_BYTES,
    Contents,
    Make,
    add,
    add_sparse,
    deflated_zeros,
    save_keras,
)
from trainer.engine.model.core import saved_model
from trainer.engine.saving import export
from trainer.engine.saving.arrays.file_kinds import read_with_text, save_with_text
from trainer.engine.saving.arrays.safetensors_file import save_arrays
from trainer.engine.saving.checkpoint import write_manifest

# --- safetensors -----------------------------------------------------------------------------------------------------

def _array(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def _safetensors(header: str | bytes, data: bytes = bytes(8)) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return len(header).to_bytes(8, "little") + header + data


_TWO = f'"a": {json.dumps(_array())}'
_SAFETENSORS = {
    "deeply nested": _safetensors('{"a":' * 100_000),
    "a list": _safetensors("[]"),
    "a name twice": _safetensors(f"{{{_TWO}, {_TWO}}}"),
    "negative offsets": _safetensors(json.dumps({"a": _array(data_offsets=[-8, 0])})),
    "a negative size": _safetensors(json.dumps({"a": _array(shape=[-2])})),
    "overlapping arrays": _safetensors(json.dumps({"a": _array(), "b": _array(data_offsets=[4, 12])}), bytes(12)),
    "a gap": _safetensors(json.dumps({"a": _array(data_offsets=[8, 16])}), bytes(16)),
    "a huge shape": _safetensors(json.dumps({"a": _array(shape=[2**62, 2**62])})),
    "a huge shape without bytes": _safetensors(json.dumps({"a": _array(shape=[2**62, 0], data_offsets=[0, 0])}), b""),
    "a number of 10,000 digits": _safetensors(f'{{"a": {{"dtype": "F32", "shape": [{"9" * 10_000}]}}}}'),
    "a number of 4,000 digits": _safetensors(json.dumps({"a": _array(shape=[int("9" * 4000)])})),
    "a size of NaN": _safetensors(json.dumps({"a": _array(shape=[float("nan")])})),
    "a size of True": _safetensors(json.dumps({"a": _array(shape=[True], data_offsets=[0, 4])}), bytes(4)),
    "a fraction": _safetensors(json.dumps({"a": _array(shape=[2.0])})),
    "an escape in a name": _safetensors(json.dumps({ESCAPE: _array()})),
    "an escape in a dtype": _safetensors(json.dumps({"a": _array(dtype=ESCAPE)})),
    "a long name": _safetensors(json.dumps({"a" * 100_000: _array()})),
    "a long dtype": _safetensors(json.dumps({"a": _array(dtype="F" * 100_000)})),
    "many dimensions": _safetensors(json.dumps({"a": _array(shape=[1] * 50_000 + [2])})),
    "half a surrogate": _safetensors('{"\\ud800": ' + json.dumps(_array()) + "}"),
    "wrong UTF-8": _safetensors(b'{"\xff": 1}'),
    "metadata of numbers": _safetensors(json.dumps({"__metadata__": {"a": 1}})),
    "a long header": (2**62).to_bytes(8, "little") + bytes(64),
}
for _name, _data in _SAFETENSORS.items():
    for _reader in ("weights", "inspect", "torch"):
        add(_reader, _name, lambda path, data=_data: path.write_bytes(data), _reader == "inspect" and _name in (
            "an escape in a name", "a huge shape without bytes", "a long name", "many dimensions", "half a surrogate"))
for _reader in ("weights", "inspect"):
    add(_reader, "an escape in the metadata", lambda path: save_arrays(
        path, {"a": np.zeros(2, np.float32)}, {ESCAPE: ESCAPE * 10}), _reader == "inspect")
add("inspect", "long metadata", lambda path: save_arrays(
    path, {"a": np.zeros(2, np.float32)}, {"a": "b" * 100_000}), True)
for _dtype in ("bfloat16", "float8_e4m3fn", "int8", "bool"):
    add("torch", f"of {_dtype}", lambda path, dtype=_dtype: save_arrays(
        path, {"head.weight": np.ones((2, 3)).astype(np.dtype(dtype)), "head.bias": np.ones(2, np.float32)}), True)
for _name in (".weight", "weight", "", "head.weight.weight", "layer99999999999.0.conv1.weight", ESCAPE + ".weight"):
    add("torch", f"the name {_name!a}", lambda path, name=_name: save_arrays(
        path, {name: np.ones((2, 3), np.float32)}))


# --- a text beside arrays: training states and exports ---------------------------------------------------------------

_TEXTS = {
    "deeply nested": "[" * 100_000,
    "deeply nested dicts": '{"dict":' * 900 + "1" + "}" * 900,
    "a list": "[]", "null": "null", "a number": "1" * 5000, "NaN": "NaN", "no text": "",
    "half a surrogate": '"\\ud800"',
}


def _state(change: Callable[[dict[str, Any]], Any]) -> str:
    document = {"kind": "training state", "format_version": 1, "inputs": {"array": "0"}, "optimizer": None}
    return json.dumps({"dict": document | change(document)})


_STATES = {
    "a huge shape": _state(lambda of: {"inputs": {"array": "0", "dtype": "<f4", "shape": [10**12]}}),
    "a negative shape": _state(lambda of: {"inputs": {"array": "0", "dtype": "<f4", "shape": [-5]}}),
    "an unknown dtype": _state(lambda of: {"inputs": {"array": "0", "dtype": ESCAPE, "shape": [0]}}),
    "objects": _state(lambda of: {"inputs": {"scalar": ["O", "00" * 8]}}),
    "a scalar without bytes": _state(lambda of: {"inputs": {"scalar": ["f4", ""]}}),
    "a version of text": _state(lambda of: {"format_version": "1"}),
    "a huge version": _state(lambda of: {"format_version": {"int": "f" * 4000}}),
    "no hexadecimal number": _state(lambda of: {"format_version": {"int": ESCAPE}}),
    "inputs of text": _state(lambda of: {"inputs": ESCAPE}),
    "an optimizer of escapes": _state(lambda of: {"optimizer": ESCAPE}),
    "a long optimizer": _state(lambda of: {"optimizer": "a" * 100_000}),
    "an unhashable key": json.dumps({"items": [[{"dict": {}}, 1]]}),
}
for _name, _text in (_TEXTS | _STATES).items():
    add("state", _name, lambda path, text=_text: save_with_text(
        str(path), saved_model.DOCUMENT_KEY, text, {"document/0": np.zeros((0, 3), np.float32)}))


def _exported(change: Callable[[dict[str, Any]], Any], program: bytes | None = None) -> Make:
    def make(contents: Contents, path: pathlib.Path, rng: random.Random) -> None:
        text, arrays = read_with_text(str(contents.good("export")), export.MANIFEST_KEY, "", "", "")
        if program is not None:
            arrays["program"] = np.frombuffer(program, np.uint8)
        manifest = json.loads(text)
        changed = change(manifest)
        save_with_text(str(path), export.MANIFEST_KEY, changed if isinstance(changed, str) else json.dumps(
            manifest | changed), arrays)
    return make


for _name, _text in _TEXTS.items():
    CRAFTED["export", _name] = _exported(lambda of, text=_text: text), False
for _name, _change in {
        "weights that are not there": {"weights": [ESCAPE]}, "a long weight": {"weights": ["a" * 100_000]},
        "weights of a number": {"weights": 3}, "a version of text": {"format_version": ESCAPE},
        "a long version": {"format_version": "a" * 100_000},
        "inputs of text": {"inputs": ESCAPE}, "a batch size of text": {"batch_size": "x"},
        "a negative batch size": {"batch_size": -3},
        "inputs of another dtype": {"inputs": {"dtype": ESCAPE, "shape": [1]}},
}.items():
    CRAFTED["export", _name] = _exported(lambda of, change=_change: change), _name == "a negative batch size"
for _name, _program in {
        "random bytes": random.Random(0).randbytes(2000), "no bytes": b"", "zeros": bytes(2000)}.items():
    CRAFTED["export", f"a program of {_name}"] = _exported(lambda of: {}, _program), False


# --- folders ---------------------------------------------------------------------------------------------------------

def _checkpoint(change: Callable[[pathlib.Path], Any], manifest: bool = True) -> Make:
    def make(contents: Contents, path: pathlib.Path, rng: random.Random) -> None:
        shutil.copytree(contents.good("checkpoint"), path)
        change(path)
        if manifest:
            write_manifest(path)
    return make


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        del content["digest"]
        content |= change(content)

        def text(value: Any) -> bytes:
            return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"

        (path / "manifest.json").write_bytes(text({**content, "digest": hashlib.sha256(text(content)).hexdigest()}))
    return write


def _edited(name: str, change: Callable[[Any], Any]) -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(change(content)))
    return write


def _replaced(name: str, write: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path], None]:
    def change(path: pathlib.Path) -> None:
        (path / name).unlink()
        write(path / name)
    return change


def _in_shards(**changes: Any) -> Callable[[Any], Any]:
    return lambda index: {name: [shard | changes for shard in shards] for name, shards in index.items()}


_SIZE = {"size": 3, "sha256": "0" * 64}
for _name, _change_folder, _signed in (
        ("a file that is a pipe", _replaced("state/0.bytes", os.mkfifo), False),
        ("a file that is a device", _replaced("state/0.bytes", lambda path: path.symlink_to("/dev/zero")), False),
        ("a document that is a pipe", _replaced("document.json", os.mkfifo), False),
        ("a manifest that is a pipe", _replaced("manifest.json", os.mkfifo), False),
        ("a manifest that is a device", _replaced("manifest.json", lambda path: path.symlink_to("/dev/zero")), False),
        ("a deep manifest", _replaced("manifest.json", lambda path: path.write_text("[" * 100_000)), False),
        ("a manifest that names a device", _manifest(lambda of: {"files": {"/dev/zero": _SIZE}}), False),
        ("a manifest that names other folders", _manifest(lambda of: {"files": {"../../../etc/passwd": _SIZE}}), False),
        ("a manifest without files", _manifest(lambda of: {"files": None}), False),
        ("a manifest with files of text", _manifest(lambda of: {"files": {"document.json": "x"}}), False),
        ("a manifest without sizes", _manifest(lambda of: {"files": {"document.json": {}}}), False),
        ("a manifest with an escape", _manifest(lambda of: {"files": {ESCAPE: _SIZE}}), False),
        ("a manifest with a long name", _manifest(lambda of: {"files": {"a" * 100_000: _SIZE}}), False),
        ("a manifest with a null character", _manifest(lambda of: {"files": {"a\0": _SIZE}}), False),
        ("a manifest of a format of text", _manifest(lambda of: {"format": "2"}), False),
        ("a manifest of a format of escapes", _manifest(lambda of: {"format": ESCAPE}), False),
        ("a manifest of a huge format", _manifest(lambda of: {"format": 10**4000}), False),
        ("a deep document", lambda path: (path / "document.json").write_text("[" * 100_000), True),
        ("a document of a list", lambda path: (path / "document.json").write_text("[]"), True),
        ("a document of no text", lambda path: (path / "document.json").write_bytes(b"\xff\x00"), True),
        ("many processes", _edited("document.json", lambda of: of | {"processes": 10**9}), True),
        ("no processes", _edited("document.json", lambda of: of | {"processes": -1}), True),
        ("processes of text", _edited("document.json", lambda of: of | {"processes": ESCAPE}), True),
        ("arrays of a list", _edited("document.json", lambda of: of | {"arrays": [3]}), True),
        ("a negative offset", _edited("state/0.json", _in_shards(offset=-8)), True),
        ("a huge offset", _edited("state/0.json", _in_shards(offset=2**62)), True),
        ("a huger offset", _edited("state/0.json", _in_shards(offset=2**80)), True),
        ("an offset of text", _edited("state/0.json", _in_shards(offset="0")), True),
        ("windows of another rank", _edited("state/0.json", _in_shards(window=[[0, 2]] * 9)), True),
        ("windows of text", _edited("state/0.json", _in_shards(window=ESCAPE)), True),
        ("huge windows", _edited("state/0.json", _in_shards(window=[[-(2**70), 2**70]] * 2)), True),
        ("a deep index", lambda path: (path / "state/0.json").write_text("[" * 100_000), True),
        ("an index of a list", lambda path: (path / "state/0.json").write_text("[]"), True),
        ("no safetensors", lambda path: (path / "arrays.safetensors").write_bytes(b"{"), True)):
    for _reader in ("checkpoint", "inspected folder"):
        CRAFTED[_reader, _name] = _checkpoint(_change_folder, _signed), _reader == "inspected folder" and (
            _signed or _name == "a manifest without files")


def _signature(change: Callable[[dict[str, Any]], Any]) -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        path.mkdir()
        save_arrays(path / "weights.safetensors", {"a": np.zeros(2, np.float32)})
        content = {"format_version": 1, "jax": "1", "stablehlo": "1", "platform": "cpu", "batch_size": 1,
                   "inputs": None, "outputs": None, "sha256": {}}
        (path / "signature.json").write_text(json.dumps(content | change(content)))
    return write


for _name, _signed_change in {
        "a program that is a device": {"sha256": {"/dev/zero": ""}},
        "a program elsewhere": {"sha256": {"../../../etc/passwd": ""}},
        "inputs of text": {"inputs": ESCAPE}, "programs of text": {"sha256": "x"}, "an escape": {"jax": ESCAPE},
        "a long text": {"jax": "a" * 100_000}}.items():
    add("inspected folder", f"a signature with {_name}", _signature(lambda of, change=_signed_change: change),
         _name in ("an escape", "a long text"))

# --- HDF5 and Keras --------------------------------------------------------------------------------------------------

def _h5(change: Callable[[Any, Any], Any]) -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        save_keras(path)
        with h5py.File(path, "r+") as file:
            change(file, file["head/head"])
    return write


def _swap(make: Callable[[Any], Any]) -> Callable[[pathlib.Path], None]:
    def change(file: Any, group: Any) -> None:
        del group["kernel:0"]
        made = make(group)
        if made is not None:
            group["kernel:0"] = made
    return _h5(change)


def _deep(file: Any, group: Any) -> None:
    del file.attrs["layer_names"]
    place = file
    for _ in range(1500):
        place = place.create_group("a")


def _circular(file: Any, group: Any) -> None:
    del file.attrs["layer_names"]
    group["again"] = file["head"]


def _named_by_text(file: Any, group: Any) -> None:
    del file.attrs["layer_names"]
    file.create_group(f"{ESCAPE}/vars").create_dataset("x" * 9000 + ESCAPE, data=np.ones(2))


for _name, _write in {
        "a link to another file": _swap(lambda group: h5py.ExternalLink("/etc/passwd", "/a")),
        "a soft link": _swap(lambda group: h5py.SoftLink("/head")),
        "values in another file": _swap(lambda group: group.create_dataset(
            "kernel:0", (3, 2), "f4", external=[("/etc/passwd", 0, 24)]) and None),
        "a virtual array": _swap(lambda group: group.create_virtual_dataset(
            "kernel:0", h5py.VirtualLayout((3, 2), "f4")) and None),
        "a huge array": _swap(lambda group: group.create_dataset(
            "kernel:0", (10**12, 2), "f4", chunks=(1000, 2)) and None),
        "text": _swap(lambda group: np.array([[b"a", b"b"]] * 3)),
        "texts of any length": _swap(lambda group: np.array([["a", "b"]] * 3, h5py.string_dtype())),
        "fields": _swap(lambda group: np.zeros((3, 2), [("a", "f4"), ("b", "S9")])),
        "references": _swap(lambda group: np.full((3, 2), group.ref, h5py.ref_dtype)),
        "a group for an array": _swap(lambda group: group.create_group("kernel:0") and None),
        "complex numbers": _swap(lambda group: np.zeros((3, 2), np.complex64)),
        "no array": _swap(lambda group: None),
        "layers of a number": _h5(lambda file, group: file.attrs.__setitem__("layer_names", 3)),
        "layers of bytes": _h5(lambda file, group: file.attrs.__setitem__("layer_names", [b"\xff"])),
        "a layer of escapes": _h5(lambda file, group: file.attrs.__setitem__("layer_names", [ESCAPE.encode()])),
        "a layer elsewhere": _h5(lambda file, group: file.attrs.__setitem__("layer_names", [b"../../a"])),
        "a layer without a name": _h5(lambda file, group: file.attrs.__setitem__("layer_names", [b""])),
        "no weights": _h5(lambda file, group: file["head"].attrs.pop("weight_names")),
        "layers that nest": _h5(_deep), "layers in a circle": _h5(_circular), "arrays of names": _h5(_named_by_text),
        "an array for a layer": _h5(lambda file, group: file.pop("head") and file.create_dataset("head", data=[1.0])),
}.items():
    add("keras", _name, _write, _name == "complex numbers")

def _doubled(file: Any, group: Any) -> None:
    del file.attrs["layer_names"]
    place = file
    for _ in range(40):  # 2**40 ways to the last
        following = place.create_group("a")
        place["b"] = following
        place = following


def _large_chunk(group: Any) -> None:
    made = group.create_dataset("kernel:0", (3, 2), "f4", maxshape=(None, 2), chunks=(2**28, 2), compression="gzip")
    checksum = (BOMB_BYTES % 65521) << 16 | 1
    made.id.write_direct_chunk((0, 0), b"\x78\x01" + deflated_zeros(BOMB_BYTES) + struct.pack(">I", checksum))


add("keras", "links that double", _h5(_doubled))
add("keras", "a chunk of 2 GB", _swap(_large_chunk))
for _reader in ("weights", "state", "export", "inspect", "torch"):
    add_sparse(_reader, (2 * 10**10).to_bytes(8, "little") + b'{"a": 1')
_sparse_header = json.dumps({"a": _array(shape=[SPARSE_BYTES // 4], data_offsets=[0, SPARSE_BYTES])}).encode()
for _reader in ("weights", "inspect", "torch"):
    add_sparse(_reader, len(_sparse_header).to_bytes(8, "little") + _sparse_header, _reader == "inspect")
add_sparse("keras")
add_sparse("keras", b"\x89HDF\r\n\x1a\n")


# --- links, and parts of checkpoints ---------------------------------------------------------------------------------

def _behind_link(name: str) -> Callable[[pathlib.Path], None]:
    def change(path: pathlib.Path) -> None:
        outside = path.parent / "outside"
        os.rename(path / name, outside)
        (path / name).symlink_to(outside)
    return change


def _cells(*windows: list[list[int]]) -> Callable[[Any], Any]:
    return lambda index: {name: [shard | {"window": window} for shard in shards for window in windows]
                          if name.endswith("kernel") else shards for name, shards in index.items()}


for _name, _change_folder in {
        **{f"{name} behind a link": _behind_link(name) for name in (
            "manifest.json", "document.json", "arrays.safetensors", "state", "state/0.json", "state/0.bytes")},
        "a part twice": _edited("state/0.json", _cells([[0, 3], [0, 2]], [[0, 3], [0, 2]])),
        "parts that overlap and leave a gap": _edited("state/0.json", _cells([[0, 2], [0, 2]], [[1, 2], [0, 2]])),
        "a part outside": _edited("state/0.json", _cells([[0, 3], [0, 2]], [[3, 4], [0, 2]])),
        "a part that is too wide": _edited("state/0.json", _cells([[0, 3], [0, 9]])),
        "an empty part": _edited("state/0.json", _cells([[0, 3], [0, 2]], [[3, 3], [0, 2]])),
        "bounds of True": _edited("state/0.json", _cells([[False, 3], [0, 2]])),
        "fractions as bounds": _edited("state/0.json", _cells([[0.0, 3.0], [0, 2]])),
        "no parts": _edited("state/0.json", _cells()),
}.items():
    CRAFTED["checkpoint", _name] = _checkpoint(_change_folder, "link" not in _name), False


# --- runs ------------------------------------------------------------------------------------------------------------

def _run(**changes: Any) -> Make:
    def make(contents: Contents, path: pathlib.Path, rng: random.Random) -> None:
        shutil.copytree(contents.good("run"), path)
        folder = max(path.glob("step_*"))
        _edited("document.json", lambda of: {
            **of, "document": {"dict": of["document"]["dict"] | changes}})(folder)
        write_manifest(folder)
    return make


for _key in ("epoch", "batch", "batches", "initial_epoch", "epochs"):
    for _name, _value in {
            "a": "a", "a negative number": -1, "True": True, "a fraction": 1.5, "escapes": ESCAPE}.items():
        CRAFTED["run", f"{_key} of {_name}"] = _run(**{_key: _value}), False
for _key in ("settings", "stop_training", "data", "fingerprint", "callbacks", "validation_sets", "kind"):
    for _value in (ESCAPE, 3, [ESCAPE], {"dict": {ESCAPE: "a" * 9000}}):
        CRAFTED["run", f"{_key} of {ascii(_value)[:20]}"] = _run(**{_key: _value}), _key in ("data", "validation_sets")
