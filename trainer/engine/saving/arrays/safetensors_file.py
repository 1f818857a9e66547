"""Arrays by path in a safetensors file: written atomically, read individually, and matched with a model's arrays.

Owns the file format and the report of matching arrays. Knows nothing of models, and runs no code from a file: it holds
a JSON header and raw bytes. This module reads and writes the format (https://github.com/huggingface/safetensors)
itself, because the library needs all arrays in host memory to write, reads no float8 into NumPy and accepts duplicate
names.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import errors, tree_paths
from trainer.core.errors import brief
from trainer.core.files import flush, local_file, open_file, parse_json, storage
from trainer.engine.saving.arrays import file_locks

Spec = tuple[tuple[int, ...], Any]  # a shape and a dtype

_CODES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
          "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
          "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
          "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()}
_KINDS = {"bool": np.bool_, "signed integer": np.signedinteger, "unsigned integer": np.unsignedinteger,
          "floating": np.floating, "complex": np.complexfloating}
_METADATA = "__metadata__"
_CHECKSUMS = "sha256_of_arrays"  # in the metadata, as JSON: the SHA-256 of each array with its name, dtype and shape
_ALIGNMENT = 8  # bytes
_LARGEST_HEADER = 100_000_000  # bytes, of the format
_BLOCK_BYTES = 2**24
_MOST_DIMENSIONS = 64  # of arrays of NumPy
_LAYERS_IN_HINT = 3  # more are hardly a head


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, jax.Array | np.ndarray],
                metadata: Mapping[str, str] | None = None, checksums: bool = False) -> None:
    """Writes arrays to a safetensors file, atomically.

    The bytes go to a hidden file in the same folder, which is then renamed in one step, or from a local file to an
    object store. If the save fails, an existing file is unchanged. Arrays are fetched from their devices one at a time.

    Args:
      path: path of the file, in an existing folder. An existing file is replaced.
      arrays: arrays by name, such as "encoder/Dense_0/kernel". A name cannot be "__metadata__".
      metadata: text to save with the arrays.
      checksums: whether to save the SHA-256 of each array too, which `ArraysFile` verifies when it reads.

    Raises:
      TypeError: if a name or a text of the metadata is not a string, or a value is not an array.
      ValueError: if safetensors does not support an array's dtype, or this process cannot access all of an array.
      OSError: if the file cannot be written.

    >>> save_arrays("weights.safetensors", {"up/bias": np.zeros(3, np.float32)}, {"epoch": "4"})
    >>> with read_arrays("weights.safetensors") as weights:
    ...     weights["up/bias"], weights.metadata
    (array([0., 0., 0.], dtype=float32), {'epoch': '4'})
    """
    if storage.is_remote(path):
        with local_file(os.fspath(path)) as local:
            save_arrays(local, arrays, metadata, checksums)
        return
    target = os.path.realpath(path)  # a link keeps its place, and its target is replaced
    folder, file_name = os.path.split(target)
    if os.path.isdir(target):
        raise IsADirectoryError(f"{os.fspath(path)!r} is a folder. Give the name of a file.")
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{os.fspath(path)!r} cannot be written: there is no folder {folder!r}. Make it first.")
    # Widest first, so that each array starts at a multiple of its items' size.
    codes = {name: _code(name, array) for name, array in arrays.items()}
    order = sorted(codes, key=lambda name: -_DTYPES[codes[name]].itemsize)
    digests = dict.fromkeys(order, "0" * 64) if checksums else {}
    header = _header(arrays, codes, order, metadata, digests)
    _remove_leftovers(folder, file_name)
    temporary = os.path.join(folder, f".{file_name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file_locks.lock(file.fileno())  # until it is closed, so that no other save takes it for a leftover
            file.write(len(header).to_bytes(8, "little") + header)
            for name in order:
                values = _bytes_of(_fetch(arrays[name]), _DTYPES[codes[name]])
                file.write(values)
                if checksums:
                    digests[name] = _digest(name, (arrays[name].shape, _DTYPES[codes[name]]), [values])
                del values
                gc.collect(1)  # since JAX 0.12 a fetched array can be part of a reference cycle
            if checksums:
                file.seek(8)
                file.write(_header(arrays, codes, order, metadata, digests))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # errors of writes name no file
            error.filename = os.fspath(path)
        raise
    flush(folder)  # the new name is on the disk only after this


def read_arrays(path: str | os.PathLike[str], folder: str | None = None) -> ArraysFile:
    """Opens a safetensors file as a mapping from names to arrays, each read on access.

    Args:
      path: path of the file.
      folder: the folder that the file belongs to, if any; see `open_file`.

    Returns:
      The open file. Use it in a `with` statement, or call its `close`.

    Raises:
      OSError: if the file cannot be opened.
      ValueError: if it is not a safetensors file, is truncated, or has an inconsistent header; also on reading an array
        whose checksum differs, in a file with checksums.

    >>> save_arrays("weights.safetensors", {"up/kernel": np.ones((2, 3), np.int8)})
    >>> with read_arrays("weights.safetensors") as weights:
    ...     list(weights), weights.shapes
    (['up/kernel'], {'up/kernel': ((2, 3), dtype('int8'))})
    """
    file = storage.downloaded(os.fspath(path)) if storage.is_remote(path) else open_file(path, folder)
    try:
        return ArraysFile(os.fspath(path), file)
    except BaseException:
        file.close()
        raise


class ArraysFile(Mapping[str, np.ndarray]):
    """The arrays of an open safetensors file by name; `read_arrays` opens it.

    Attributes:
      metadata: text that was saved with the arrays.
      shapes: shape and dtype of each array by name, in the header's order.
    """

    def __init__(self, path: str, file: BinaryIO):
        self._path, self._file = path, file
        size = os.fstat(file.fileno()).st_size
        self._data_start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8:
            raise ValueError(f"{path!r} is not a safetensors file, or was cut short: it has {size} bytes.")
        if self._data_start > _LARGEST_HEADER + 8:
            raise ValueError(f"{path!r} is not a safetensors file: its first 8 bytes are not the length of a header.")
        if self._data_start > size:
            raise ValueError(f"{path!r} is not a safetensors file, or was cut short: a header of "
                             f"{self._data_start - 8} bytes does not fit into {size} bytes.")
        try:
            header = parse_json(file.read(self._data_start - 8).decode(), object_pairs_hook=_unique)
            self.metadata, self.shapes, self._offsets = _parsed(header)
        except _HeaderError as error:
            raise ValueError(f"{path!r} has a damaged header: {brief(error)}.") from None
        except (ValueError, RecursionError, MemoryError):
            raise ValueError(f"{path!r} is not a safetensors file, or its header is damaged: it has no JSON where a "
                             "header would be.") from None
        self._digests = _parsed_digests(path, self.metadata.pop(_CHECKSUMS, None), self.shapes)
        described = self._data_start + max((end for _, end in self._offsets.values()), default=0)
        if described != size:
            raise ValueError(f"{path!r} is {'cut short' if size < described else 'too long'}: its header describes "
                             f"{described} bytes, it has {size}.")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            near = errors.near_names(str(name), self.shapes)
            hint = f" Did you mean {' or '.join(repr(known) for known in near)}?" if near else ""
            raise KeyError(f"{self._path!r} has no array {name!r}.{hint}")
        shape, dtype = self.shapes[name]
        begin, end = self._offsets[name]
        values = np.empty(end - begin, np.uint8)
        self._read_into(name, values, begin)
        self._check_digest(name, [values.data])
        return values.view(dtype).reshape(shape)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of an array, of which little is in memory at once."""
        begin, end = self._offsets[name]
        for start in range(begin, end, _BLOCK_BYTES):
            values = np.empty(min(_BLOCK_BYTES, end - start), np.uint8)
            self._read_into(name, values, start)
            yield values.data

    def verify(self, name: str) -> None:
        """Raises ValueError if the checksum of an array differs, without all of the array in memory."""
        self._check_digest(name, self.blocks(name))

    def _read_into(self, name: str, values: np.ndarray, begin: int) -> None:
        done = 0
        while done < len(values):  # one call reads 2 GiB at most
            count = os.preadv(self._file.fileno(), [values[done:].data], self._data_start + begin + done)
            if count == 0:
                raise ValueError(f"{self._path!r} was cut short while it was open: {brief(repr(name))} cannot be read.")
            done += count

    def _check_digest(self, name: str, blocks: Iterable[memoryview]) -> None:
        if self._digests is not None and self._digests[name] != _digest(name, self.shapes[name], blocks):
            raise ValueError(f"{self._path!r} is damaged: the array {brief(repr(name))} does not have the checksum "
                             "that it was saved with. Copy the file again, or save it again.")

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # without reading the array

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def has_checksums(self) -> bool:
        """Whether each array is verified with its checksum when it is read."""
        return self._digests is not None

    def close(self) -> None:
        """Closes the file. Arrays that were read remain valid."""
        self._file.close()

    def __enter__(self) -> ArraysFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class MatchReport:
    """Match between the arrays of a file and the arrays of a model.

    Attributes:
      matched: names in both, with the same shape and kind of dtype.
      missing: names in the model but not in the file.
      unexpected: names in the file but not in the model.
      mismatched: names in both whose shapes or kinds of dtype differ, with (shape, dtype) in the file and in the model.
      skipped: names in either that no pattern selects; the other attributes exclude them.
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, tuple[Spec, Spec]]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["1 array matches." if len(self.matched) == 1 else f"{len(self.matched)} arrays match."]
        lines += errors.listed("missing from the file", self.missing, self.unexpected)
        lines += errors.listed("not in the model", self.unexpected, self.missing)
        lines += errors.listed("of another shape or kind of dtype",
                         [f"{name} (file: {_spec_text(found)}, model: {_spec_text(wanted)})"
                          for name, (found, wanted) in self.mismatched.items()])
        return "\n".join(lines + errors.listed("selected by no pattern", self.skipped))

    def raise_unless_complete(self, partial: bool | None = False) -> None:
        """Checks that all selected arrays can be loaded.

        Args:
          partial: whether arrays may be missing from the file or from the model, as long as an array matches; None
            means False where the caller has neither this argument nor `patterns`, so that the message recommends
            neither.

        Raises:
          ValueError: if an array is missing or unexpected and `partial` is not true, if shapes or kinds of dtype
            differ, or if `partial` is true and nothing matches.
        """
        incomplete = bool(self.missing or self.unexpected)
        if self.mismatched or (incomplete and not (partial and self.matched)):
            hint = f"\n{self._hint(partial)}" if (self.matched or self.mismatched) and partial is not None else ""
            raise ValueError(f"The file's arrays do not fit the model. {self}{hint}")

    def _hint(self, partial: bool) -> str:
        """Returns the arguments that load the arrays that match."""
        if not self.mismatched:
            return "Pass `partial=True` to load those that match."
        if self.skipped:
            return "Select fewer by `patterns`, without those of another shape or kind of dtype."
        layers = sorted({name.rpartition(tree_paths.SEPARATOR)[0] or name for name in self.mismatched})
        if len(layers) > _LAYERS_IN_HINT:
            return "Pass `patterns=`, regular expressions for the layers that shall be loaded."
        names = "|".join(re.escape(layer) for layer in layers)
        pattern = f"^(?!({names})(/|$)).*" if len(layers) > 1 else f"^(?!{names}(/|$)).*"
        remain = [name for name in (*self.missing, *self.unexpected) if tree_paths.matches(pattern, name)]
        if not any(tree_paths.matches(pattern, name) for name in self.matched):
            return "Make the module with the arguments that it had when the file was saved."
        also = " and `partial=True`" if remain and not partial else ""
        return f"To leave out the layers whose shapes differ, pass `patterns={[pattern]!r}`{also}."


def match_arrays(available: Mapping[str, Spec], wanted: Mapping[str, Spec],
                 patterns: Sequence[str] | None = None) -> MatchReport:
    """Matches the arrays of a file with the arrays of a model.

    Dtypes match if they are of the same kind, such as float32 and bfloat16: the reader casts.

    Args:
      available: shape and dtype by name in the file, as in `ArraysFile.shapes`.
      wanted: shape and dtype by name in the model.
      patterns: regular expressions over whole path segments, as in `tree_paths.matches`: names without a match are
        skipped. None selects all.

    Raises:
      TypeError: if `patterns` is a string, or has elements other than strings.
      ValueError: if `patterns` is empty, or a pattern is not a regular expression or matches no wanted name.

    >>> file = {"up/bias": ((3,), np.dtype("float32")), "down/bias": ((3,), np.dtype("float32"))}
    >>> print(match_arrays(file, {"up/bias": ((2,), np.dtype("float32"))}))
    0 arrays match.
    1 not in the model: down/bias
    1 of another shape or kind of dtype: up/bias (file: float32(3,), model: float32(2,))
    """
    names = list(dict.fromkeys([*wanted, *available]))
    selected = set(names)
    if patterns is not None:
        tree_paths.check_patterns("patterns", patterns, wanted)
        if not patterns:
            raise ValueError("`patterns` is empty, which would load nothing. Pass None to load everything.")
        selected = {name for name in names if any(tree_paths.matches(pattern, name) for pattern in patterns)}
    chosen = [name for name in names if name in selected]
    shared = [name for name in chosen if name in wanted and name in available]
    mismatched = {name: (available[name], wanted[name]) for name in shared
                  if _comparable(available[name]) != _comparable(wanted[name])}
    return MatchReport(matched=tuple(name for name in shared if name not in mismatched),
                       missing=tuple(name for name in chosen if name not in available),
                       unexpected=tuple(name for name in chosen if name not in wanted), mismatched=mismatched,
                       skipped=tuple(name for name in names if name not in selected))


def checksum(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of a file's content: a text, and the name, shape, dtype and bytes of each array."""
    digest = hashlib.sha256()

    def add(header: str) -> None:
        digest.update(len(header.encode()).to_bytes(8, "little") + header.encode())

    add(text)
    for name in sorted(arrays):
        if isinstance(arrays, ArraysFile):
            (shape, dtype), blocks = arrays.shapes[name], arrays.blocks(name)
        else:
            shape, dtype = arrays[name].shape, arrays[name].dtype
            blocks = iter([np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data])
        add(json.dumps([name, shape, str(dtype)]))
        for block in blocks:
            digest.update(block)
    return digest.hexdigest()


class _HeaderError(Exception):
    """An error in a header."""


def _code(name: Any, array: Any) -> str:
    if not isinstance(name, str):
        raise errors.wrong_type("arrays", name, "a mapping from names, which are strings, to arrays")
    if name == _METADATA:
        raise ValueError(f"No array can have the name {_METADATA!r}: the format keeps it for the metadata. Rename it.")
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise errors.wrong_type(f"arrays[{name!r}]", array, "a JAX or NumPy array")
    if array.dtype.name not in _CODES:
        hint = " Save `jax.random.key_data` of it." if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else ""
        raise ValueError(f"The array {name!r} has the dtype {array.dtype}, which a safetensors file cannot hold.{hint} "
                         f"It can hold: {', '.join(_CODES)}.")
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(f"The array {name!r} is split over several processes, so this one cannot save it. Gather it "
                         "first, with `jax.experimental.multihost_utils.process_allgather(array, tiled=True)`.")
    return _CODES[array.dtype.name]


def _header(arrays: Mapping[str, Any], codes: Mapping[str, str], order: Iterable[str],
            metadata: Mapping[str, str] | None, digests: Mapping[str, str]) -> bytes:
    offsets, end = {}, 0
    for name in order:
        begin, end = end, end + math.prod(arrays[name].shape) * _DTYPES[codes[name]].itemsize
        offsets[name] = [begin, end]
    if not all(isinstance(text, str) for pair in (metadata or {}).items() for text in pair):
        raise TypeError("`metadata` must map strings to strings. Received: a key or a value of another type.")
    metadata = {**(metadata or {}), **({_CHECKSUMS: json.dumps(digests, ensure_ascii=False)} if digests else {})}
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    for name, code in codes.items():
        header[name] = {"dtype": code, "shape": [int(dim) for dim in arrays[name].shape], "data_offsets": offsets[name]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _digest(name: str, spec: Spec, blocks: Iterable[memoryview]) -> str:
    digest = hashlib.sha256(json.dumps([name, [int(dim) for dim in spec[0]], str(spec[1])]).encode())
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _parsed_digests(path: str, text: str | None, names: Mapping[str, Spec]) -> dict[str, str] | None:
    """Returns the checksums of arrays by name; None if the file has none, such as files of other programs."""
    if text is None:
        return None
    try:
        digests = parse_json(text)
    except (ValueError, RecursionError):
        digests = None
    if not isinstance(digests, dict) or digests.keys() != names.keys():
        raise ValueError(f"{path!r} is damaged: its checksums do not match its arrays. Copy the file again, or "
                         "save it again.")
    return digests


def _remove_leftovers(folder: str, file_name: str) -> None:
    """Removes the temporary files of killed saves to the same name."""
    leftover = re.compile(re.escape(f".{file_name}.") + "[0-9a-f]{12}[.]tmp")
    for name in filter(leftover.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another process has just done so
            if file_locks.is_abandoned(path):
                os.unlink(path)


def _fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(array, jax.Array):
        # JAX keeps a host copy as long as its array lives. This array shares the buffers and lives for a single write.
        array = jax.make_array_from_single_device_arrays(array.shape, array.sharding,
                                                         [shard.data for shard in array.addressable_shards])
    return np.asarray(array)


def _bytes_of(values: np.ndarray, dtype: np.dtype) -> memoryview:
    return np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8).data


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _HeaderError(f"the name {repeated!r} is there twice")
    return found


def _parsed(header: object) -> tuple[dict[str, str], dict[str, Spec], dict[str, tuple[int, int]]]:
    if not isinstance(header, dict):
        raise _HeaderError("it is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _HeaderError("its metadata does not map strings to strings")
    shapes: dict[str, Spec] = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise _HeaderError(f"{name!r} lacks a dtype, a shape or offsets")
        code, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str) or code not in _DTYPES:
            raise _HeaderError(f"{name!r} has the dtype {code!r}, which is not one of {', '.join(_DTYPES)}")
        if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
            raise _HeaderError(f"{name!r} has a shape or offsets that are not whole numbers")
        if span[1] - span[0] != math.prod(shape) * _DTYPES[code].itemsize:
            raise _HeaderError(f"{name!r} has {span[1] - span[0]} bytes, which its shape {tuple(shape)} of "
                               f"{_DTYPES[code]} does not fill")
        shapes[name], offsets[name] = (tuple(shape), _DTYPES[code]), (span[0], span[1])
    expected = 0
    for name, (begin, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if begin != expected:
            raise _HeaderError(f"{name!r} starts at byte {begin}, the array before it ends at byte {expected}: they "
                               f"{'overlap' if begin < expected else 'leave a gap'}")
        expected = end
    return metadata, shapes, offsets


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and len(values) <= _MOST_DIMENSIONS and all(
        type(value) is int and 0 <= value < 2**63 for value in values)


def _comparable(spec: Spec) -> tuple[tuple[int, ...], str]:
    shape, dtype = spec
    kinds = (kind for kind, parent in _KINDS.items() if jnp.issubdtype(dtype, parent))
    return tuple(shape), next(kinds, str(dtype))


def _spec_text(spec: Spec) -> str:
    return f"{spec[1]}{tuple(spec[0])}"
