"""Data sets, archives, media and texts that were made to do harm, for `hostile_files.py`."""

from __future__ import annotations

import bz2
import gzip
import io
import pathlib
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from typing import Any

import numpy as np

from tests.support.hostile_contents import (
    BOMB_BYTES,
    CRAFTED,
    ESCAPE,
    Canary,
    add,
    add_sparse,
    gzip_bomb,
    gzipped,
    objects,
    record,
    save_image,
    save_npz,
    save_patched_zip,
    save_tar,
    save_zip,
    save_zip_bomb,
    write_json,
)

_PART = 2**24

# --- JSON ------------------------------------------------------------------------------------------------------------

_JSON = {
    "deeply nested": "[" * 100_000, "a list": "[1]", "a text": '"a"', "a number": "3", "null": "null",
    "wrong UTF-8": b"\xff\xfe{}", "a long number": "9" * 10_000, "no JSON": "{'a': 1}",
}
for _name, _text_or_bytes in _JSON.items():
    for _reader in ("report", "words", "begun", "best"):
        add(_reader, f"JSON: {_name}", lambda path, content=_text_or_bytes: path.write_bytes(
            content if isinstance(content, bytes) else content.encode()), _reader == "begun" and _name == "null")
for _name, _words in {
        "values of text": {"a": ESCAPE}, "values of NaN": {"a": float("nan")}, "lists": {"a": [1]}}.items():
    add("words", _name, lambda path, words=_words: write_json(path, words))
for _name, _best in {"a loss of text": {"loss": ESCAPE}, "a loss of a list": {"loss": [1]}}.items():
    add("best", _name, lambda path, best=_best: write_json(path, best))
for _key in ("history", "epochs", "epochs_of", "timing", "model", "status", "error", "earlier", "peak_memory",
             "compile", "data", "git", "command", "versions"):
    for _value in (ESCAPE, [1, [ESCAPE]], {"name": {"a": ESCAPE}}):
        add("report", f"{_key} of {ascii(_value)[:12]}", lambda path, key=_key, value=_value: write_json(
            path, record(**{key: value})), True)


for _reader, _member in (("keras", "model.weights.h5"), ("npz", "x_train.npy"), ("archive", "a.txt"),
                         ("rows", "rows.npy"), ("objects", "x_train.npy")):
    add(_reader, "a zip bomb", lambda path, name=_member: save_zip_bomb(path, name))
    add(_reader, "a zip bomb that claims 5,000 bytes", lambda path, name=_member: save_zip_bomb(path, name, 5000))
    add(_reader, "an encrypted member", lambda path, name=_member: save_patched_zip(
        path, name, bytes(600), {6: b"\1"}, compression=zipfile.ZIP_DEFLATED))
    add(_reader, "an unknown compression", lambda path, name=_member: save_patched_zip(
        path, name, bytes(600), {8: b"\x63\0"}, compression=zipfile.ZIP_DEFLATED))
    add(_reader, "a wrong checksum", lambda path, name=_member: save_patched_zip(
        path, name, bytes(600), {14: b"\1\2\3\4"}, compression=zipfile.ZIP_DEFLATED))
    add(_reader, "an empty archive", lambda path: save_zip(path, {}), _reader == "archive")


# --- data sets -------------------------------------------------------------------------------------------------------

def _npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data


_NPY = {
    "a huge array": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n"),
    "a negative size": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}\n", bytes(24)),
    "code in the header": _npy("{'descr': __import__('os').mkdir('canary'), 'fortran_order': False, 'shape': (3,)}\n"),
    "a deep header": _npy("(" * 9000),
    "an unknown dtype": _npy(f"{{'descr': {ESCAPE!r}, 'fortran_order': 0, 'shape': ()}}"),
    "fields": _npy("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,)}\n", bytes(8)),
    "objects without a stream": _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"),
    "another version": _npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}\n", bytes(8), b"\x09\0"),
    "no array": b"", "text": b"hello" * 9,
}
for _name, _data in _NPY.items():
    for _reader, _member in (("npz", "x_train.npy"), ("objects", "x_train.npy"), ("rows", "shape.npy")):
        add(_reader, f"{_member} of {_name}", lambda path, member=_member, data=_data: save_zip(path, {
            **dict.fromkeys(("x_test.npy", "y_train.npy", "y_test.npy", "rows.npy"), _NPY["no array"]), member: data}),
             _reader == "npz" and _name == "fields")
for _reader in ("npz", "objects", "rows"):
    add(_reader, "objects that run code", lambda path: save_npz(path, **dict.fromkeys(
        ("x_train", "y_train", "x_test", "y_test", "shape", "rows"), objects(Canary(path.parent.parent / "canary")))))
for _name, _found in {
        "numbers for texts": np.arange(3), "words of text": objects(["a", ESCAPE], ["b"]), "no words": objects([], []),
        "words of nothing": objects(None, None), "fractions": objects([1.5], [2.5]), "no texts": objects(),
        "dicts": objects({"a": 1}, {}), "a number": np.array(3)}.items():
    add("objects", _name, lambda path, found=_found: save_npz(
        path, x_train=found, y_train=np.arange(2), x_test=found, y_test=np.arange(2)), _name == "no words")
add("objects", "labels of another length", lambda path: save_npz(
    path, x_train=objects([1], [2]), y_train=np.arange(1), x_test=objects([1], [2]), y_test=np.arange(1)))


for _name, _data in {"255 dimensions": b"\0\0\x08\xff" + b"\1" * 40,
                     "a huge shape": b"\0\0\x08\x03" + b"\xff" * 12 + bytes(9),
                     "no dimensions": b"\0\0\x08\0" + bytes(9),
                     "another kind": b"\0\0\x0d\1\0\0\0\1\0",
                     "trailing bytes": b"\0\0\x08\1\0\0\0\1" + bytes(9)}.items():
    add("idx", _name, lambda path, data=_data: gzipped(path, data))
add("idx", "a bomb", lambda path: gzip_bomb(path, b"\0\0\x08\1\x17\xd7\x84\0"))
add("idx", "a bomb of zeros", lambda path: gzip_bomb(path, b""))

for _name, _value in {
        "a list": [1, 2], "no data": {b"labels": [1]},
        "data of another size": {b"data": np.zeros(5, np.uint8), b"labels": [1]},
        "labels of text": {b"data": np.zeros((1, 3072), np.uint8), b"labels": [ESCAPE]},
        "large labels": {b"data": np.zeros((1, 3072), np.uint8), b"labels": [3000]},
        "keys of numbers": {3: 4}, "more labels": {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1, 2]},
        "keys of bytes": {b"\xff": 4}}.items():
    add("cifar", _name, lambda path, value=_value: path.write_bytes(pickle.dumps(value, 2)))
for _name, _data in {
        "an allocation": b"\x80\x04\x8e" + (2**40).to_bytes(8, "little"),
        "deep lists": b"(" * 100_000 + b"l" * 100_000 + b".",
        "a long memo": b"\x80\x02Nr\xff\xff\xff\x7f.", "a name of code": b"cos\nsystem\n(S'mkdir canary'\ntR.",
        "a long name of code": b"c" + b"o" * 50_000 + b"\nsystem\n.", "extensions": b"\x80\x02\x82\1.",
        "a persistent name": b"Pa\n."}.items():
    add("cifar", f"a stream of {_name}", lambda path, data=_data: path.write_bytes(data))


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
    add("archive", _name, lambda path, members=_members: save_tar(path, *members), _name == "an absolute member")
add("archive", "a tar bomb", lambda path: gzip_bomb(path, _large_member().tobuf()))
add("archive", "a tar cut in a member", lambda path: _cut_tar(path))


def _cut_tar(path: pathlib.Path) -> None:
    save_tar(path, (tarfile.TarInfo("a"), random.Random(0).randbytes(50_000)))
    path.write_bytes(path.read_bytes()[:30_000])


for _name in ("../../../outside.txt", "/tmp/outside-hostile.txt", f"../../../{ESCAPE}", "a" * 5000, "a/" * 2500 + "b",
              "../" + "a" * 5000):
    add("archive", f"a zip with {ascii(_name)[:30]} ({len(_name)})",
        lambda path, name=_name: save_zip(path, {name: b"x"}))
add("archive", "a zip with a file for a folder", lambda path: save_zip(path, {"a": b"x", "a/b": b"x"}))


# --- media -----------------------------------------------------------------------------------------------------------

def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + b"".join(
        chunk(*each) for each in chunks) + chunk(b"IEND", b"")


def _encoded(format_name: str) -> bytes:
    buffer = io.BytesIO()
    save_image(buffer, format=format_name)  # type: ignore[arg-type]
    return buffer.getvalue()


def _overwritten(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value):]


_ZEROS = zlib.compress(bytes(50_000_000), 1)
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
    "PPM of a long number": b"P6 " + b"9" * 5000 + b" 1 255\n",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "XBM": b"#define a_width 9999999\n#define a_height 9999999\nstatic char a[] = {",
}
for _name, _data in _IMAGES.items():
    for _reader in ("image", "images"):
        add(_reader, _name, lambda path, data=_data: path.write_bytes(data), _name in (
            "a text bomb", "a profile bomb", "GIF of a huge size", "BMP with a palette elsewhere",
            "BMP of a negative width"))


def _wav(tag: int = 1, channels: int = 1, rate: int = 8000, align: int = 2, bits: int = 16, length: int = 16,
         data: bytes = bytes(16)) -> bytes:
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, tag, channels, rate, rate * align & 2**32 - 1, align, bits)
    body = head + b"data" + struct.pack("<I", length) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


for _name, _data in {
        "no channels": _wav(channels=0), "no bits": _wav(bits=0), "no rate": _wav(rate=0),
        "no alignment": _wav(align=0),
        "another format": _wav(tag=85), "a long chunk": _wav(length=2**32 - 2), "no samples": _wav(length=0, data=b""),
        "many channels": _wav(channels=65535, align=65535), "many bits": _wav(bits=65535),
        "half a sample": _wav(length=15),
        "a stream": b"RIFF\xff\xff\xff\xff" + _wav()[8:], "RF64": b"RF64" + _wav()[4:], "RIFX": b"RIFX" + _wav()[4:],
        "NaN": _wav(3, bits=32, align=4, data=struct.pack("<4f", *[float("nan")] * 4))}.items():
    add("sounds", _name, lambda path, data=_data: path.write_bytes(data), _name in (
        "a stream", "no samples", "NaN", "half a sample", "many channels", "no bits"))


# --- lines -----------------------------------------------------------------------------------------------------------

for _name, _text in {
        "an escape in a column": f'epoch,"{ESCAPE}"\n', "a long column": f"epoch,{'a' * 200_000}\n",
        "an open quote": 'epoch,"' + "a\n" * 100_000, "many columns": "epoch" + ",a" * 100_000 + "\n",
        "another first column": f"{'a' * 100_000},loss\n", "null characters": "epoch,\0\0\n"}.items():
    add("csv", _name, lambda path, text=_text: path.write_text(text))
for _name, _text in {"a word twice": "a\na\nb\n", "fewer words": "a\n"}.items():
    add("vocabulary", _name, lambda path, text=_text: path.write_text(text))
add("texts", "wrong UTF-8", lambda path: path.write_bytes(b"\xff" * 9))

for _reader in ("report", "words", "begun", "best", "npz", "objects", "rows", "cifar", "idx", "vocabulary",
                "texts", "csv", "earlier"):
    add_sparse(_reader, may_read=_reader in ("csv", "earlier"))
add_sparse("sounds", b"RIFF\xff\xff\xff\xff" + _wav()[8:])
add_sparse("image", _encoded("PNG")[:-12], True)
for _reader in ("words", "report"):
    add(_reader, "many lists", lambda path: path.write_bytes(b"[" + b"[]," * 4_000_000))
for _reader in ("report", "begun", "rows", "best", "images", "sounds", "texts"):
    CRAFTED[_reader, "a link out of the folder"] = (
        lambda contents, path, rng, reader=_reader: path.symlink_to(contents.good(reader))), False
add("words", "a long word of escapes", lambda path: write_json(path, {ESCAPE * 9000: "a"}))
for _name in ("$\\frac{a$", "$", "$$", "\\", "_^{", ESCAPE, "a" * 9000):
    add("report", f"a log of the name {ascii(_name)[:12]}", lambda path, name=_name: write_json(
        path, record(history={name: [1.0], "loss": [2.0]}, epochs=[0])), True)
    add("images", f"an image of the name {ascii(_name)[:12]}", lambda path, name=_name: (
        path.parent / f"{name[:50]}.png").write_bytes(b"x"))
for _key in ("history", "epochs", "epochs_of", "timing", "model", "peak_memory", "compile", "data", "git", "earlier",
             "command", "train_step_flops", "seed", "fit"):
    for _value in (3, -1.5, "a", [], {}, [[1]], [None], {"a": {"b": [1]}}, {"total": "a"}, {"a": ["b"]}, [{"a": 1}]):
        add("report", f"{_key}={_value}", lambda path, key=_key, value=_value: write_json(
            path, record(**{key: value})), True)


def _shared(depth: int) -> list[Any]:
    made: list[Any] = [0]
    for _ in range(depth):
        made = [made, made]
    return made


add("cifar", "lists that double", lambda path: path.write_bytes(pickle.dumps(
    {b"data": _shared(29), b"labels": [1]}, 2)))
add("cifar", "labels that double", lambda path: path.write_bytes(pickle.dumps(
    {b"data": np.zeros((1, 3072), np.uint8), b"labels": _shared(29)}, 2)))
add("objects", "one long list many times", lambda path: save_npz(
    path, y_train=np.arange(9000), y_test=np.arange(1), x_test=objects([1]), x_train=objects(*[[1] * 20_000] * 9000)))
add("objects", "lists that double", lambda path: save_zip(path, {
    "x_train.npy": _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n", pickle.dumps(_shared(29), 2)),
    **dict.fromkeys(("x_test.npy", "y_train.npy", "y_test.npy"), b"")}))


def _large_member(kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo("zeros")
    member.type, member.size = kind, BOMB_BYTES
    return member


def _chained(path: pathlib.Path) -> None:
    """Writes links through which a path is longer than the file system can resolve, unlike a part of it."""
    long, members = "a" * 247, []
    for number in range(16):
        parent = "/".join("abcdefghijklmnop"[:number])
        members.append(_member_of(f"{parent}/{long}".strip("/"), tarfile.DIRTYPE))
        members.append(_member_of(f"{parent}/{'abcdefghijklmnop'[number]}".strip("/"), tarfile.SYMTYPE, long))
    members.append(_member_of("a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/" + "l" * 254, tarfile.SYMTYPE, "../" * 16))
    members.append(_member_of("escape", tarfile.SYMTYPE, "a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/" + "l" * 254 + "/../../.."))
    members.append(_member_of("escape/outside.txt"))
    save_tar(path, *members)


for _name, _kind in {
        "a": tarfile.XHDTYPE, "a global": tarfile.XGLTYPE, "a long name's": tarfile.GNUTYPE_LONGNAME}.items():
    add("archive", f"{_name} header of 2 GB", lambda path, kind=_kind: gzip_bomb(path, _large_member(kind).tobuf()))
add("archive", "many members", lambda path: path.write_bytes(
    gzip.compress(tarfile.TarInfo("a").tobuf() * 50_000) * 4))
add("archive", "links to a path that is too long", _chained)
add("archive", "a bomb of bzip2", lambda path: path.write_bytes(
    bz2.compress(_large_member().tobuf()) + bz2.compress(bytes(_PART)) * (BOMB_BYTES // _PART)))
add("archive", "a zip bomb of bzip2", lambda path: save_patched_zip(
    path, "a", bz2.compress(bytes(2**29)), {8: b"\x0c\0", 22: struct.pack("<I", 5000)}))
