"""Paths of the local disk, and of object stores such as "s3://bucket/run", by the same functions.

Owns which of the two a path names, and the drivers of the stores, which are fsspec's. A store differs from a disk: an
object appears whole or not at all, nothing is renamed or appended to, and a folder is only a beginning of names.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from trainer.core import arguments
from trainer.core.errors import brief, see

# Of these, an object appears whole, also where it replaces another; and the packages that fsspec needs.
DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
           "abfss": "adlfs", "memory": ""}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_REQUEST_BYTES = 2**26  # of one read
_BUFFER_BYTES = 2**22


def as_place(argument: str, value: object, expected: str = "the path of a file") -> str:
    """Returns `value`, a path of the local file system or of an object store, as text.

    Args:
      argument: name of the argument, for the error.
      value: a path, or a URL such as "s3://bucket/run".
      expected: expected values in the error.

    Raises:
      TypeError: `value` is not a path.
      ValueError: `value` is empty, or a URL of anything but an object store.
      ImportError: the packages of the store are not installed.

    >>> as_place("backup_dir", "memory://bucket/run/")
    'memory://bucket/run'
    >>> as_place("backup_dir", "https://example.com/run")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: `backup_dir` must be a local path or a URL of an object store (s3, s3a, gs, gcs, az, abfs, abfss, \
memory). Received: 'https://example.com/run'. See ...
    """
    path = os.fsdecode(value) if isinstance(value, (str, bytes, os.PathLike)) else ""
    match = _URL.fullmatch(path)
    if match is None:
        return arguments.as_path(argument, value, expected)
    if match[1] not in DRIVERS or not match[2].strip("/"):
        raise ValueError(f"`{argument}` must be a local path or a URL of an object store ({', '.join(DRIVERS)}). "
                         f"Received: {path!r}. {see('url-as-path')}")
    _store(path)
    return _normal(path)


def as_file(argument: str, value: object) -> str:
    """Returns `value`, the path of a file that exists or is to be written, as text.

    Raises:
      IsADirectoryError: `value` is a local folder.
      TypeError, ValueError, ImportError: as `as_place` does.
    """
    path = as_place(argument, value)
    if not is_remote(path) and os.path.isdir(path):
        raise IsADirectoryError(f"`{argument}` must be the path of a file, and is a folder. Received: {path!r}. Give "
                                "the name of a file in it.")
    return path


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is in an object store.

    >>> is_remote("s3://bucket/run"), is_remote("runs/first")
    (True, False)
    """
    match = _URL.fullmatch(os.fspath(path))
    return match is not None and match[1] in DRIVERS


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns a path that does not depend on the working folder."""
    return _normal(os.fspath(path)) if is_remote(path) else os.path.abspath(path)


def real(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path without links."""
    return _normal(os.fspath(path)) if is_remote(path) else os.path.realpath(path)


def exists(path: str) -> bool:
    """Returns whether a file or a folder is there."""
    return is_file(path) or is_folder(path) if is_remote(path) else os.path.exists(path)


def is_file(path: str) -> bool:
    """Returns whether a path is a file."""
    if not is_remote(path):
        return os.path.isfile(path)
    with _naming(path):
        store, name = _store(path)
        try:
            return store.info(name)["type"] == "file"
        except FileNotFoundError:  # fsspec's `isfile` takes any failure, such as of the network, for an absence
            return False


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder; of an object store, whether there are objects in it."""
    if not is_remote(path):
        return os.path.isdir(path)
    return bool(_entries(path))


def names(folder: str) -> list[str]:
    """Returns the sorted names in a folder, of a store [] if there are none."""
    return sorted(_entries(folder)) if is_remote(folder) else sorted(os.listdir(folder))


def folder_names(folder: str) -> list[str]:
    """Returns the sorted names of the folders in a folder, [] if there is no such folder."""
    if is_remote(folder):
        return sorted(name for name, is_folder in _entries(folder).items() if is_folder)
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def make_folder(path: str) -> None:
    """Makes a folder and those around it, if they are missing; in a store a folder needs nothing."""
    if not is_remote(path):
        os.makedirs(path or os.curdir, exist_ok=True)


def remove(path: str) -> None:
    """Removes a file, or a folder with its content. In a store, objects beside folders go first, as they name others.

    Raises:
      FileNotFoundError: if there is nothing.
      OSError: if it cannot be removed.
    """
    if is_remote(path):
        with _naming(path):
            store, name = _store(path)
            found = store.find(name)
            if not found:
                raise FileNotFoundError(f"There is nothing at {path!r}.")
            for each in sorted(found, key=lambda each: each.count("/")):
                store.rm_file(each)  # fsspec's `rm` takes brackets and stars in names for patterns
            folders = getattr(store, "pseudo_dirs", [])  # that uploads make in fsspec's memory
            folders[:] = [folder for folder in folders if not f"{folder}/".startswith(f"{name}/")]
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def size(path: str) -> int:
    """Returns the bytes of a file; raises IsADirectoryError for a folder, and FileNotFoundError."""
    if is_folder(path):
        raise IsADirectoryError(path)
    if not is_remote(path):
        return os.path.getsize(path)
    with _naming(path):
        store, name = _store(path)
        return int(store.info(name)["size"])


def sizes(folder: str) -> dict[str, int]:
    """Returns the bytes of each object below a folder of a store, by path below it."""
    with _naming(folder):
        store, name = _store(folder)
        found = store.find(name, detail=True)
        return {path.strip("/").removeprefix(name.strip("/") + "/"): int(about["size"])
                for path, about in found.items()}


def abort_uploads(folder: str) -> None:
    """Removes the parts of objects below a folder of a store that a killed process had begun, as far as it is allowed.

    Only S3 keeps such parts, and shows them only on the bill.
    """
    with contextlib.suppress(OSError), _naming(folder):
        store, name = _store(folder)
        if not hasattr(store, "list_multipart_uploads"):
            return
        bucket, _, prefix = name.partition("/")
        uploads = store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/").get("Uploads", [])
        for upload in uploads:
            store.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


# --- content of objects ----------------------------------------------------------------------------------------------


def open_object(path: str) -> io.BufferedReader:
    """Opens an object for reading, from any position.

    Raises:
      FileNotFoundError: if there is no such object.
      OSError: if the store cannot be reached.
    """
    return io.BufferedReader(_Object(path), _BUFFER_BYTES)


def downloaded(path: str) -> io.BufferedRandom:
    """Returns an unnamed local file with the content of an object; see `open_object`."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115  The caller closes it.
    try:
        with open_object(path) as content:
            shutil.copyfileobj(content, copy, _REQUEST_BYTES)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def write_object(path: str, content: bytes) -> None:
    """Writes an object in one request.

    Raises:
      OSError: if it cannot be written. An earlier object remains.
    """
    with _naming(path):
        store, name = _store(path)
        store.pipe_file(name, content)


def upload(local: str, path: str) -> None:
    """Writes a file of the local disk to an object, which appears when all of it is there; see `write_object`."""
    with _naming(path):
        store, name = _store(path)
        store.put_file(local, name)


class NewObject:
    """An object to write in pieces, which appears when a `with` statement ends without an exception.

    Args:
      path: path where nothing is.
    """

    def __init__(self, path: str):
        self._path = path
        with _naming(path):
            self._store, self._name = _store(path)
            self._file = self._store.open(self._name, "wb")

    def write(self, content: Any) -> int:
        """Writes some bytes, and returns their number; raises OSError if the store refuses them."""
        with _naming(self._path):
            return self._file.write(content)

    def __enter__(self) -> NewObject:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with _naming(self._path):
            if kind is None:
                self._file.close()
                return
        with contextlib.suppress(Exception):  # the error that ended the statement is told
            self._file.discard()
            self._file.closed = True  # otherwise its deletion would make an object of a part
        with contextlib.suppress(OSError):  # in fsspec's memory, an object grows as it is written
            remove(self._path)


class _Object(io.RawIOBase):
    """An object that is read by ranges."""

    def __init__(self, path: str):
        self.name = path
        with _naming(path):
            self._store, self._key = _store(path)
            about = self._store.info(self._key)
        if about["type"] != "file":
            raise FileNotFoundError(f"There is no object {path!r}.")
        self._size, self._at = int(about["size"]), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at, _REQUEST_BYTES)
        if count <= 0:
            return 0
        with _naming(self.name):
            content = self._store.cat_file(self._key, start=self._at, end=self._at + count)
        buffer[:len(content)] = content
        self._at += len(content)
        return len(content)


def _store(path: str) -> tuple[Any, str]:
    """Returns the file system of an object store, and the path in it."""
    scheme = path.partition("://")[0]
    try:
        import fsspec

        # Without a cache of names: other processes write too.
        store: Any = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        packages = " ".join(["'trainer-jax[remote]'", DRIVERS[scheme]]).strip()
        raise ImportError(f"{path!r} is in an object store, which needs packages that are not installed: "
                          f"`pip install {packages}`. {brief(error)}") from error
    return store, store._strip_protocol(path)


def _entries(folder: str) -> dict[str, bool]:
    """Returns the names in a folder of a store, and whether each is a folder."""
    with _naming(folder):
        store, name = _store(folder)
        try:
            found = store.ls(name, detail=True)
        except FileNotFoundError:
            return {}
        here = name.strip("/") + "/"
        names = {entry["name"].strip("/").removeprefix(here): entry["type"] == "directory" for entry in found
                 if entry["name"].strip("/").startswith(here)}
        return {name: is_folder for name, is_folder in names.items() if name}


def _normal(path: str) -> str:
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{posixpath.normpath(rest).lstrip('/')}"


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Makes an OSError that names the path of whatever a driver raises."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except OSError as error:
        if path in str(error):
            raise
        text = f"{path!r}: {error.strerror or brief(error) or type(error).__name__}"
        raise (type(error)(text) if error.errno is None else type(error)(error.errno, text)) from error
    except Exception as error:  # of botocore, aiohttp and others
        raise OSError(f"{path!r} cannot be reached: {type(error).__name__}: {brief(error)}") from error
