"""Contents for `hostile_files.py`: a good file for each reader, and the register of files that were made to do harm."""

from __future__ import annotations

import gzip
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
import weakref
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np
from PIL import Image
from scipy.io import wavfile

from trainer.callbacks.record.run_record import FORMAT
from trainer.engine.saving.arrays.safetensors_file import save_arrays

ESCAPE = "\x1b[31m\n\x07"
_NAMES = {"keras": "head.weights.h5", "csv": "log.csv", "report": "run.json", "idx": "train-labels-idx1-ubyte.gz",
          "cifar": "data_batch_1", "image": "0.png", "images": "0.png", "sounds": "0.wav", "texts": "0.txt",
          "begun": "begun.json", "best": "best.json", "rows": "table-0-of-1.npz", "words": "words.json",
          "archive": "file.tar.gz", "earlier": "run.json"}
_CIFAR = ("data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_OTHERS = {"cifar": _CIFAR, "idx": (
    "train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")}
BOMB_BYTES = 2**31
SPARSE_BYTES = 20 * 10**9
_CHUNK = 2**24

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
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
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


def save_npz(path: pathlib.Path, **arrays: Any) -> None:
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def hostile_readers() -> Any:
    """Returns the module of the readers, which imports this one."""
    from tests.support import hostile_readers

    return hostile_readers


def _moved(save: Callable[[str], None], suffix: str) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        save(f"{path}{suffix}")
        os.rename(f"{path}{suffix}", path)
    return make


def save_keras(path: pathlib.Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [b"head"]
        group = file.create_group("head")
        group.attrs["weight_names"] = [b"head/kernel:0", b"head/bias:0"]
        group["head/kernel:0"], group["head/bias:0"] = np.ones((3, 2), np.float32), np.ones(2, np.float32)


def objects(*texts: Any) -> np.ndarray:
    made = np.empty(len(texts), object)
    made[:] = list(texts)
    return made


def gzipped(path: pathlib.Path, data: bytes) -> None:
    with gzip.open(path, "wb") as file:
        file.write(data)


def _fashion(path: pathlib.Path) -> None:
    labels, images = b"\0\0\x08\x01" + struct.pack(">I", 2) + b"\1\2", b"\0\0\x08\x03" + struct.pack(
        ">III", 2, 2, 2) + bytes(8)
    for kind in ("train", "t10k"):
        gzipped(path.parent / f"{kind}-labels-idx1-ubyte.gz", labels)
        gzipped(path.parent / f"{kind}-images-idx3-ubyte.gz", images)


def _cifar(path: pathlib.Path) -> None:
    data = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}, 2)
    for name in (path.name, *_CIFAR):
        (path.parent / name).write_bytes(data)


def save_tar(path: pathlib.Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def record(**changes: Any) -> dict[str, Any]:
    return {"format": FORMAT, "status": "ended", "model": {"name": "model", "parameters": 8}} | changes


_GOOD: dict[str, Callable[[pathlib.Path], None]] = {
    "weights": lambda path: hostile_readers().model().save_weights(path),
    "state": _moved(lambda path: hostile_readers().model().save(path), ".safetensors"),
    "export": _moved(lambda path: hostile_readers().model().export(path), ".export"),
    "inspect": _moved(lambda path: hostile_readers().model().save_weights(path), ".safetensors"),
    "report": lambda path: write_json(path, record()),
    "keras": save_keras,
    "torch": lambda path: save_arrays(
        path, {"head.weight": np.ones((2, 3), np.float32), "head.bias": np.ones(2, np.float32)}),
    "npz": lambda path: save_npz(path, **dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.arange(9))),
    "objects": lambda path: save_npz(path, x_train=objects([1, 2], [3]), y_train=np.arange(2),
                                     x_test=objects([1, 2], [3]), y_test=np.arange(2)),
    "idx": _fashion,
    "cifar": _cifar,
    "words": lambda path: write_json(path, {"a": 1}),
    "archive": lambda path: save_tar(path, (tarfile.TarInfo("a.txt"), bytes(600))),
    "image": lambda path: save_image(path),
    "images": lambda path: save_image(path),
    "sounds": lambda path: wavfile.write(path, 8000, np.arange(20, dtype=np.int16)),
    "texts": lambda path: path.write_text("one two three" * 9),
    "csv": lambda path: path.write_text("epoch,loss\n0,1.0\n"),
    "begun": lambda path: write_json(path, {}),
    "best": lambda path: write_json(path, {"loss": 2.0}),
    "rows": lambda path: save_npz(path, shape=np.array((4, 2)), rows=np.zeros((4, 2), np.float32)),
    "vocabulary": lambda path: path.write_text("a\nb\nc\n"),
    "checkpoint": lambda path: hostile_readers().model().save(path),
    "inspected folder": lambda path: hostile_readers().model().save(path),
    "run": lambda path: hostile_readers().train(path, 1),
    "earlier": lambda path: write_json(path, record(earlier=[])),
}


def save_image(path: pathlib.Path, **options: Any) -> None:
    Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(path, **({"format": "PNG"} | options))


def write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def add(reader: str, name: str, write: Callable[[pathlib.Path], Any], may_read: bool = False) -> None:
    """Registers a hostile file, which `write` makes; `may_read` where a reader may take it for good."""
    CRAFTED[reader, name] = (lambda contents, path, rng: write(path)), may_read


def add_sparse(reader: str, begin: bytes = b"", may_read: bool = False) -> None:
    """Registers a file of 20 GB, of which the disk has but the beginning."""
    def write(path: pathlib.Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, len(begin) + SPARSE_BYTES)

    add(reader, f"20 GB of zeros after {len(begin)} bytes", write, may_read)


def deflated_zeros(count: int) -> bytes:
    """Returns a stream of deflate with that many zeros, made from one part of it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    part = packer.compress(bytes(_CHUNK)) + packer.flush(zlib.Z_FULL_FLUSH)
    return part * (count // _CHUNK) + packer.flush(zlib.Z_FINISH)


def gzip_bomb(path: pathlib.Path, start: bytes) -> None:
    """Writes a gzip file with a beginning and many zeros."""
    path.write_bytes(gzip.compress(start) + gzip.compress(bytes(_CHUNK)) * (BOMB_BYTES // _CHUNK))


def save_zip(path: pathlib.Path, members: Mapping[str, bytes], **options: Any) -> None:
    """Writes a zip archive."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def save_patched_zip(path: pathlib.Path, name: str, data: bytes, patches: Mapping[int, bytes], **options: Any) -> None:
    """Writes a zip archive with a member whose two headers have other bytes at some places."""
    save_zip(path, {name: data}, **options)
    content = bytearray(path.read_bytes())
    for start, shift in ((content.index(b"PK\x03\x04"), 0), (content.rindex(b"PK\x01\x02"), 2)):
        for offset, value in patches.items():
            place = start + offset + shift
            content[place:place + len(value)] = value
    path.write_bytes(content)


def save_zip_bomb(path: pathlib.Path, name: str, claimed: int = BOMB_BYTES) -> None:
    """Writes a zip archive with a member of many zeros, whose headers claim a size."""
    save_patched_zip(path, name, deflated_zeros(BOMB_BYTES), {8: b"\x08\0", 22: struct.pack("<I", claimed)})
