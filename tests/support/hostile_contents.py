"""Contents for `hostile_files.py`: a good file for each reader, and files that were made to do harm."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import socket
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np
from PIL import Image
from scipy.io import wavfile

from trainer.callbacks.record.run_record import FORMAT
from trainer.engine.model.core import saved_model
from trainer.engine.saving import export
from trainer.engine.saving.arrays.file_kinds import read_with_text, save_with_text
from trainer.engine.saving.arrays.safetensors_file import save_arrays
from trainer.engine.saving.checkpoint import write_manifest

ESCAPE = "\x1b[31m\n\x07"
_NAMES = {"keras": "head.weights.h5", "csv": "log.csv", "report": "run.json", "idx": "train-labels-idx1-ubyte.gz",
          "cifar": "data_batch_1", "image": "0.png", "images": "0.png", "sounds": "0.wav", "texts": "0.txt",
          "begun": "begun.json", "best": "best.json", "rows": "table-0-of-1.npz", "words": "words.json",
          "archive": "file.tar.gz"}
_CIFAR = ("data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_OTHERS = {"cifar": _CIFAR, "idx": (
    "train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")}
BOMB_BYTES = 400_000_000

Make = Callable[["Contents", pathlib.Path, random.Random], None]
CRAFTED: dict[tuple[str, str], tuple[Make, bool]] = {}


def path_in(folder: pathlib.Path, reader: str) -> pathlib.Path:
    """Returns the path in a folder that a reader takes."""
    return folder / _NAMES.get(reader, f"hostile_{reader.replace(' ', '_')}")


def _no_permission(path: pathlib.Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


def _socket(path: pathlib.Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


NO_FILES: dict[str, Callable[[pathlib.Path], None]] = {
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": pathlib.Path.mkdir,
    "nothing": lambda path: None,
    "a link to itself": lambda path: path.symlink_to(path),
    "a socket": _socket,
    **({"no permission": _no_permission} if os.geteuid() else {}),
}


class Canary:
    """A value whose pickle makes a folder when it is read."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Contents:
    """Good files, each made once."""

    def __init__(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="hostile-"))
        self._bytes: dict[str, bytes] = {}

    def good(self, reader: str) -> pathlib.Path:
        """Returns a good file or folder for a reader."""
        path = path_in(self.folder / reader, reader)
        if not path.parent.exists():
            path.parent.mkdir()
            _GOOD[reader](path)
        return path

    def copy_others(self, reader: str, folder: pathlib.Path) -> None:
        """Makes a folder with the files that a reader needs besides its hostile file."""
        folder.mkdir()
        for name in (_OTHERS.get(reader, ())):
            shutil.copy(self.good(reader).parent / name, folder)

    def of(self, reader: str) -> bytes:
        """Returns the bytes of a good file."""
        if reader not in self._bytes:
            self._bytes[reader] = self.good(reader).read_bytes()
        return self._bytes[reader]


def _npz(path: pathlib.Path, **arrays: Any) -> None:
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def _model() -> Any:
    from tests.support import hostile_readers

    return hostile_readers.model()


def _weights(path: pathlib.Path) -> None:
    save_arrays(path, {name: np.asarray(value) for name, value in {
        "params/head/kernel": np.ones((3, 2), np.float32), "params/head/bias": np.ones(2, np.float32)}.items()})


def _moved(save: Callable[[str], None], suffix: str) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        save(f"{path}{suffix}")
        os.rename(f"{path}{suffix}", path)
    return make


def _keras(path: pathlib.Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [b"head"]
        group = file.create_group("head")
        group.attrs["weight_names"] = [b"head/kernel:0", b"head/bias:0"]
        group["head/kernel:0"], group["head/bias:0"] = np.ones((3, 2), np.float32), np.ones(2, np.float32)


def _objects(*texts: Any) -> np.ndarray:
    made = np.empty(len(texts), object)
    made[:] = list(texts)
    return made


def _gzipped(path: pathlib.Path, data: bytes) -> None:
    with gzip.open(path, "wb") as file:
        file.write(data)


def _fashion(path: pathlib.Path) -> None:
    labels, images = b"\0\0\x08\x01" + struct.pack(">I", 2) + b"\1\2", b"\0\0\x08\x03" + struct.pack(
        ">III", 2, 2, 2) + bytes(8)
    for kind in ("train", "t10k"):
        _gzipped(path.parent / f"{kind}-labels-idx1-ubyte.gz", labels)
        _gzipped(path.parent / f"{kind}-images-idx3-ubyte.gz", images)


def _cifar(path: pathlib.Path) -> None:
    data = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}, 2)
    for name in (path.name, *_CIFAR):
        (path.parent / name).write_bytes(data)


def _tar(path: pathlib.Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _record(**changes: Any) -> dict[str, Any]:
    return {"format": FORMAT, "status": "ended", "model": {"name": "model", "parameters": 8}} | changes


_GOOD: dict[str, Callable[[pathlib.Path], None]] = {
    "weights": lambda path: _model().save_weights(path),
    "state": _moved(lambda path: _model().save(path), ".safetensors"),
    "export": _moved(lambda path: _model().export(path), ".export"),
    "inspect": _moved(lambda path: _model().save_weights(path), ".safetensors"),
    "report": lambda path: _write_json(path, _record()),
    "keras": _keras,
    "torch": lambda path: save_arrays(
        path, {"head.weight": np.ones((2, 3), np.float32), "head.bias": np.ones(2, np.float32)}),
    "npz": lambda path: _npz(path, **dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.arange(9))),
    "objects": lambda path: _npz(path, x_train=_objects([1, 2], [3]), y_train=np.arange(2), x_test=_objects([1, 2], [3]),
                                 y_test=np.arange(2)),
    "idx": _fashion,
    "cifar": _cifar,
    "words": lambda path: _write_json(path, {"a": 1}),
    "archive": lambda path: _tar(path, (tarfile.TarInfo("a.txt"), bytes(600))),
    "image": lambda path: _image(path),
    "images": lambda path: _image(path),
    "sounds": lambda path: wavfile.write(path, 8000, np.arange(20, dtype=np.int16)),
    "texts": lambda path: path.write_text("one two three" * 9),
    "csv": lambda path: path.write_text("epoch,loss\n0,1.0\n"),
    "begun": lambda path: _write_json(path, {}),
    "best": lambda path: _write_json(path, {"loss": 2.0}),
    "rows": lambda path: _npz(path, shape=np.array((4, 2)), rows=np.zeros((4, 2), np.float32)),
    "vocabulary": lambda path: path.write_text("a\nb\nc\n"),
    "checkpoint": lambda path: _model().save(path),
    "inspected folder": lambda path: _model().save(path),
}


def _image(path: pathlib.Path, **options: Any) -> None:
    Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(path, **({"format": "PNG"} | options))


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def crafted(reader: str, name: str, may_read: bool = False) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        CRAFTED[reader, name] = make, may_read
        return make
    return add


def _add(reader: str, name: str, write: Callable[[pathlib.Path], Any], may_read: bool = False) -> None:
    CRAFTED[reader, name] = (lambda contents, path, rng: write(path)), may_read


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
        _add(_reader, _name, lambda path, data=_data: path.write_bytes(data), _reader == "inspect" and _name in (
            "an escape in a name", "a huge shape without bytes", "a long name", "many dimensions", "half a surrogate"))
for _reader in ("weights", "inspect"):
    _add(_reader, "an escape in the metadata", lambda path: save_arrays(
        path, {"a": np.zeros(2, np.float32)}, {ESCAPE: ESCAPE * 10}), _reader == "inspect")
_add("inspect", "long metadata", lambda path: save_arrays(
    path, {"a": np.zeros(2, np.float32)}, {"a": "b" * 100_000}), True)
for _dtype in ("bfloat16", "float8_e4m3fn", "int8", "bool"):
    _add("torch", f"of {_dtype}", lambda path, dtype=_dtype: save_arrays(
        path, {"head.weight": np.ones((2, 3)).astype(np.dtype(dtype)), "head.bias": np.ones(2, np.float32)}), True)
for _name in (".weight", "weight", "", "head.weight.weight", "layer99999999999.0.conv1.weight", ESCAPE + ".weight"):
    _add("torch", f"the name {_name!a}", lambda path, name=_name: save_arrays(
        path, {name: np.ones((2, 3), np.float32)}))


# --- a text beside arrays: training states and exports ---------------------------------------------------------------

_TEXTS = {
    "deeply nested": "[" * 100_000,
    "deeply nested dicts": '{"dict":' * 900 + "1" + "}" * 900,
    "a list": "[]", "null": "null", "a number": "1" * 5000, "NaN": "NaN", "no text": "", "half a surrogate": '"\\ud800"',
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
    _add("state", _name, lambda path, text=_text: save_with_text(
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
        "a negative batch size": {"batch_size": -3}, "inputs of another dtype": {"inputs": {"dtype": ESCAPE, "shape": [1]}},
}.items():
    CRAFTED["export", _name] = _exported(lambda of, change=_change: change), _name == "a negative batch size"
for _name, _program in {"random bytes": random.Random(0).randbytes(2000), "no bytes": b"", "zeros": bytes(2000)}.items():
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
        content = {"format_version": 1, "jax": "1", "stablehlo": "1", "platform": "cpu", "batch_size": 1, "inputs": None,
                   "outputs": None, "sha256": {}}
        (path / "signature.json").write_text(json.dumps(content | change(content)))
    return write


for _name, _signed_change in {
        "a program that is a device": {"sha256": {"/dev/zero": ""}},
        "a program elsewhere": {"sha256": {"../../../etc/passwd": ""}},
        "inputs of text": {"inputs": ESCAPE}, "programs of text": {"sha256": "x"}, "an escape": {"jax": ESCAPE},
        "a long text": {"jax": "a" * 100_000}}.items():
    _add("inspected folder", f"a signature with {_name}", _signature(lambda of, change=_signed_change: change),
         _name in ("an escape", "a long text"))


# --- JSON ------------------------------------------------------------------------------------------------------------

_JSON = {
    "deeply nested": "[" * 100_000, "a list": "[1]", "a text": '"a"', "a number": "3", "null": "null",
    "wrong UTF-8": b"\xff\xfe{}", "a long number": "9" * 10_000, "no JSON": "{'a': 1}",
}
for _name, _text_or_bytes in _JSON.items():
    for _reader in ("report", "words", "begun", "best"):
        _add(_reader, f"JSON: {_name}", lambda path, content=_text_or_bytes: path.write_bytes(
            content if isinstance(content, bytes) else content.encode()), _reader == "begun" and _name == "null")
for _name, _words in {"values of text": {"a": ESCAPE}, "values of NaN": {"a": float("nan")}, "lists": {"a": [1]}}.items():
    _add("words", _name, lambda path, words=_words: _write_json(path, words))
for _name, _best in {"a loss of text": {"loss": ESCAPE}, "a loss of a list": {"loss": [1]}}.items():
    _add("best", _name, lambda path, best=_best: _write_json(path, best))
for _key in ("history", "epochs", "epochs_of", "timing", "model", "status", "error", "earlier", "peak_memory", "compile",
             "data", "git", "command", "versions"):
    for _value in (ESCAPE, [1, [ESCAPE]], {"name": {"a": ESCAPE}}):
        _add("report", f"{_key} of {ascii(_value)[:12]}", lambda path, key=_key, value=_value: _write_json(
            path, _record(**{key: value})), True)


# --- HDF5 and Keras --------------------------------------------------------------------------------------------------

def _h5(change: Callable[[Any, Any], Any]) -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        _keras(path)
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
    _add("keras", _name, _write, _name == "complex numbers")


def _zip(path: pathlib.Path, members: Mapping[str, bytes], **options: Any) -> None:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _packed_bomb(path: pathlib.Path, name: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, archive.open(name, "w") as file:
        for _ in range(BOMB_BYTES // 2**24):
            file.write(bytes(2**24))


def _patched(path: pathlib.Path, name: str, offset: int, value: bytes) -> None:
    """Writes a zip archive with a member whose two headers have other bytes."""
    _zip(path, {name: bytes(600)}, compression=zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    for start, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        place = data.index(start) + offset + shift
        data[place:place + len(value)] = value
    path.write_bytes(data)


for _reader, _member in (("keras", "model.weights.h5"), ("npz", "x_train.npy"), ("archive", "a.txt"),
                         ("rows", "rows.npy"), ("objects", "x_train.npy")):
    _add(_reader, "a zip bomb", lambda path, name=_member: _packed_bomb(path, name))
    _add(_reader, "an encrypted member", lambda path, name=_member: _patched(path, name, 6, b"\1"))
    _add(_reader, "an unknown compression", lambda path, name=_member: _patched(path, name, 8, b"\x63\0"))
    _add(_reader, "a wrong checksum", lambda path, name=_member: _patched(path, name, 14, b"\1\2\3\4"))
    _add(_reader, "an empty archive", lambda path: _zip(path, {}), _reader == "archive")


# --- data sets -------------------------------------------------------------------------------------------------------

def _npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data


_NPY = {
    "a huge array": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n"),
    "a negative size": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}\n", bytes(24)),
    "code in the header": _npy("{'descr': __import__('os').mkdir('canary'), 'fortran_order': False, 'shape': (3,)}\n"),
    "a deep header": _npy("(" * 9000), "an unknown dtype": _npy(f"{{'descr': {ESCAPE!r}, 'fortran_order': 0, 'shape': ()}}"),
    "fields": _npy("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,)}\n", bytes(8)),
    "objects without a stream": _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"),
    "another version": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}\n", bytes(8), b"\x09\0"),
    "no array": b"", "text": b"hello" * 9,
}
for _name, _data in _NPY.items():
    for _reader, _member in (("npz", "x_train.npy"), ("objects", "x_train.npy"), ("rows", "shape.npy")):
        _add(_reader, f"{_member} of {_name}", lambda path, member=_member, data=_data: _zip(path, {
            **dict.fromkeys(("x_test.npy", "y_train.npy", "y_test.npy", "rows.npy"), _NPY["no array"]), member: data}),
             _reader == "npz" and _name == "fields")
for _reader in ("npz", "objects", "rows"):
    _add(_reader, "objects that run code", lambda path: _npz(path, **dict.fromkeys(
        ("x_train", "y_train", "x_test", "y_test", "shape", "rows"), _objects(Canary(path.parent.parent / "canary")))))
for _name, _found in {
        "numbers for texts": np.arange(3), "words of text": _objects(["a", ESCAPE], ["b"]), "no words": _objects([], []),
        "words of nothing": _objects(None, None), "fractions": _objects([1.5], [2.5]), "no texts": _objects(),
        "dicts": _objects({"a": 1}, {}), "a number": np.array(3)}.items():
    _add("objects", _name, lambda path, found=_found: _npz(
        path, x_train=found, y_train=np.arange(2), x_test=found, y_test=np.arange(2)), _name == "no words")
_add("objects", "labels of another length", lambda path: _npz(
    path, x_train=_objects([1], [2]), y_train=np.arange(1), x_test=_objects([1], [2]), y_test=np.arange(1)))


for _name, _data in {"255 dimensions": b"\0\0\x08\xff" + b"\1" * 40,
                     "a huge shape": b"\0\0\x08\x03" + b"\xff" * 12 + bytes(9), "no dimensions": b"\0\0\x08\0" + bytes(9),
                     "another kind": b"\0\0\x0d\1\0\0\0\1\0", "trailing bytes": b"\0\0\x08\1\0\0\0\1" + bytes(9)}.items():
    _add("idx", _name, lambda path, data=_data: _gzipped(path, data))
_add("idx", "a bomb", lambda path: _gzip_bomb(path, b"\0\0\x08\1\x17\xd7\x84\0"))
_add("idx", "a bomb of zeros", lambda path: _gzip_bomb(path, b""))

for _name, _value in {
        "a list": [1, 2], "no data": {b"labels": [1]}, "data of another size": {b"data": np.zeros(5, np.uint8), b"labels": [1]},
        "labels of text": {b"data": np.zeros((1, 3072), np.uint8), b"labels": [ESCAPE]},
        "large labels": {b"data": np.zeros((1, 3072), np.uint8), b"labels": [3000]},
        "keys of numbers": {3: 4}, "more labels": {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1, 2]},
        "keys of bytes": {b"\xff": 4}}.items():
    _add("cifar", _name, lambda path, value=_value: path.write_bytes(pickle.dumps(value, 2)))
for _name, _data in {
        "an allocation": b"\x80\x04\x8e" + (2**40).to_bytes(8, "little"), "deep lists": b"(" * 100_000 + b"l" * 100_000 + b".",
        "a long memo": b"\x80\x02Nr\xff\xff\xff\x7f.", "a name of code": b"cos\nsystem\n(S'mkdir canary'\ntR.",
        "a long name of code": b"c" + b"o" * 50_000 + b"\nsystem\n.", "extensions": b"\x80\x02\x82\1.",
        "a persistent name": b"Pa\n."}.items():
    _add("cifar", f"a stream of {_name}", lambda path, data=_data: path.write_bytes(data))


# --- archives --------------------------------------------------------------------------------------------------------

def _member_of(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member, b"x" if kind == tarfile.REGTYPE else b""


for _name, _members in {
        "a member in the parent": [_member_of("../../../outside.txt")],
        "an absolute member": [_member_of("/tmp/outside-hostile.txt")],
        "a link out": [_member_of("a", tarfile.SYMTYPE, "../../..")],
        "a link out that is followed": [_member_of("a", tarfile.SYMTYPE, "../../.."), _member_of("a/outside.txt")],
        "an absolute link": [_member_of("a", tarfile.SYMTYPE, "/etc/passwd")],
        "a hard link out": [_member_of("a", tarfile.LNKTYPE, "../../../etc/passwd")],
        "a device": [_member_of("a", tarfile.CHRTYPE)], "a pipe in it": [_member_of("a", tarfile.FIFOTYPE)],
        "a link to itself in it": [_member_of("a", tarfile.SYMTYPE, "a"), _member_of("a/b")],
        "a long member": [_member_of("a" * 5000)],
        "a file for a folder": [_member_of("a"), _member_of("a/b")],
        "an escape in a member": [_member_of(f"../../../{ESCAPE}")]}.items():
    _add("archive", _name, lambda path, members=_members: _tar(path, *members), _name == "an absolute member")
_add("archive", "a tar bomb", lambda path: _tar_bomb(path))
_add("archive", "a tar cut in a member", lambda path: _cut_tar(path))


def _tar_bomb(path: pathlib.Path) -> None:
    member = tarfile.TarInfo("zeros")
    member.size = BOMB_BYTES
    _gzip_bomb(path, member.tobuf())


def _gzip_bomb(path: pathlib.Path, start: bytes) -> None:
    with gzip.open(path, "wb", 1) as file:
        file.write(start)
        for _ in range(BOMB_BYTES // 2**24 + 1):
            file.write(bytes(2**24))


def _cut_tar(path: pathlib.Path) -> None:
    _tar(path, (tarfile.TarInfo("a"), random.Random(0).randbytes(50_000)))
    path.write_bytes(path.read_bytes()[:30_000])


for _name in ("../../../outside.txt", "/tmp/outside-hostile.txt", f"../../../{ESCAPE}", "a" * 5000, "a/" * 2500 + "b",
              "../" + "a" * 5000):
    _add("archive", f"a zip with {ascii(_name)[:30]} ({len(_name)})", lambda path, name=_name: _zip(path, {name: b"x"}))
_add("archive", "a zip with a file for a folder", lambda path: _zip(path, {"a": b"x", "a/b": b"x"}))


# --- media -----------------------------------------------------------------------------------------------------------

def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + b"".join(
        chunk(*each) for each in chunks) + chunk(b"IEND", b"")


def _encoded(format_name: str) -> bytes:
    buffer = io.BytesIO()
    _image(buffer, format=format_name)  # type: ignore[arg-type]
    return buffer.getvalue()


def _overwritten(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value):]


_ZEROS = zlib.compress(bytes(50_000_000))
_IMAGES = {
    "a huge size": _png(100_000, 100_000, (b"IDAT", _ZEROS)), "a size of 2**31": _png(2**31 - 1, 2**31 - 1),
    "a large size": _png(12_000, 12_000, (b"IDAT", _ZEROS)),
    "no width": _png(0, 10, (b"IDAT", b"")), "no pixels": _png(10, 10), "a text bomb": _png(
        10, 10, (b"zTXt", b"a\0\0" + _ZEROS)),
    "a profile bomb": _png(10, 10, (b"iCCP", b"a\0\0" + _ZEROS)),
    "no zlib": _png(10, 10, (b"IDAT", b"hello")),
    "BMP of a negative width": _overwritten(_encoded("BMP"), 18, struct.pack("<i", -10)),
    "BMP of a huge size": _overwritten(_encoded("BMP"), 18, struct.pack("<ii", 2**30, 2**30)),
    "BMP with a palette elsewhere": _overwritten(_encoded("BMP"), 10, struct.pack("<I", 2**31)),
    "GIF of a huge size": _overwritten(_encoded("GIF"), 6, b"\xff\xff\xff\xff"),
    "GIF cut short": _encoded("GIF")[:60], "JPEG cut short": _encoded("JPEG")[:200],
    "JPEG of a huge size": _encoded("JPEG").replace(struct.pack(">HH", 10, 10), b"\xff\xdc\xff\xdc", 1),
    "TIFF with a circle": b"II*\0\x08\0\0\0\0\0\x08\0\0\0", "PPM of a huge size": b"P6 99999 99999 255\n",
    "PPM of a long number": b"P6 " + b"9" * 5000 + b" 1 255\n", "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "XBM": b"#define a_width 9999999\n#define a_height 9999999\nstatic char a[] = {",
}
for _name, _data in _IMAGES.items():
    for _reader in ("image", "images"):
        _add(_reader, _name, lambda path, data=_data: path.write_bytes(data), _name in (
            "a text bomb", "a profile bomb", "GIF of a huge size", "BMP with a palette elsewhere",
            "BMP of a negative width"))


def _wav(tag: int = 1, channels: int = 1, rate: int = 8000, align: int = 2, bits: int = 16, length: int = 16,
         data: bytes = bytes(16)) -> bytes:
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, tag, channels, rate, rate * align & 2**32 - 1, align, bits)
    body = head + b"data" + struct.pack("<I", length) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


for _name, _data in {
        "no channels": _wav(channels=0), "no bits": _wav(bits=0), "no rate": _wav(rate=0), "no alignment": _wav(align=0),
        "another format": _wav(tag=85), "a long chunk": _wav(length=2**32 - 2), "no samples": _wav(length=0, data=b""),
        "many channels": _wav(channels=65535, align=65535), "many bits": _wav(bits=65535), "half a sample": _wav(length=15),
        "a stream": b"RIFF\xff\xff\xff\xff" + _wav()[8:], "RF64": b"RF64" + _wav()[4:], "RIFX": b"RIFX" + _wav()[4:],
        "NaN": _wav(3, bits=32, align=4, data=struct.pack("<4f", *[float("nan")] * 4))}.items():
    _add("sounds", _name, lambda path, data=_data: path.write_bytes(data), _name in (
        "a stream", "no samples", "NaN", "half a sample", "many channels", "no bits"))


# --- lines -----------------------------------------------------------------------------------------------------------

for _name, _text in {
        "an escape in a column": f'epoch,"{ESCAPE}"\n', "a long column": f"epoch,{'a' * 200_000}\n",
        "an open quote": 'epoch,"' + "a\n" * 100_000, "many columns": "epoch" + ",a" * 100_000 + "\n",
        "another first column": f"{'a' * 100_000},loss\n", "null characters": "epoch,\0\0\n"}.items():
    _add("csv", _name, lambda path, text=_text: path.write_text(text))
for _name, _text in {"a word twice": "a\na\nb\n", "fewer words": "a\n"}.items():
    _add("vocabulary", _name, lambda path, text=_text: path.write_text(text))
_add("texts", "wrong UTF-8", lambda path: path.write_bytes(b"\xff" * 9))
