"""Files from URLs, in the cache folder that Keras uses too.

Owns the place of a file and its download. A file appears complete and verified, or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from trainer.callbacks.progress.progbar import Progbar
from trainer.core import arguments
from trainer.core.ambient.interactive_logging import print_message
from trainer.core.calls.entry_points import explains_arguments
from trainer.core.files import open_file
from trainer.utils.files import archives

_SCHEMES = ("http", "https", "ftp", "file")
_CHUNK_BYTES = 2**20
_TIMEOUT_SECS = 60
_DIGITS = {"md5": 32, "sha256": 64}


def cache_home() -> str:
    """Returns the cache folder, `$KERAS_HOME` or `~/.keras`, as in Keras."""
    chosen = os.environ.get("KERAS_HOME")
    return arguments.as_path("KERAS_HOME", chosen, "the path of a folder") if chosen else os.path.join(
        os.path.expanduser("~"), ".keras")


@explains_arguments
def get_file(
    fname: str | os.PathLike[str] | None = None,
    origin: str | os.PathLike[str] | None = None,
    untar: bool = False,
    md5_hash: str | None = None,
    file_hash: str | None = None,
    cache_subdir: str = "datasets",
    hash_algorithm: str = "auto",
    extract: bool = False,
    archive_format: str | list[str] | None = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
) -> str:
    """Returns the path of a file or of an extracted archive, downloaded unless it is in the cache folder.

    A download gets its name after it is complete and its hash is verified: an interrupted or wrong download leaves
    nothing. The paths equal Keras's, so both share the files.

    Args:
      fname: name of the file in the cache; by default the last part of `origin`. With `extract`, a name without a dot
        is the name of the folder.
      origin: an `http`, `https`, `ftp` or `file` URL, or the path of a file.
      untar: like `extract`, for tar archives only.
      md5_hash: like `file_hash`, for MD5.
      file_hash: expected hash in hexadecimal digits: SHA-256, or the older MD5. A cached file with another hash is
        downloaded again.
      cache_subdir: folder in the cache folder, or an absolute path.
      hash_algorithm: "sha256", "md5", or "auto", which depends on the number of digits.
      extract: whether to extract the file as an archive. No member can lie outside of its folder.
      archive_format: "tar" (also compressed), "zip", a list of these, or "auto" for both; None for neither.
      cache_dir: cache folder; by default `$KERAS_HOME`, or `~/.keras`.
      force_download: whether to download a cached file again.

    Raises:
      TypeError: for an argument of a wrong type.
      ValueError: for an invalid argument, another hash than the expected hash, or a file that is not an archive.
      FileNotFoundError, OSError: if there is no such file, or the server is unreachable; the message names the URL.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "words.txt").write_text("one two")
    >>> path = get_file(origin=folder / "words.txt", cache_dir=folder / "cache")  # doctest: +ELLIPSIS
    Downloading data from file:///...
    7/7 - 0s - ...s/byte
    >>> pathlib.Path(path).relative_to(folder), pathlib.Path(path).read_text()
    (PosixPath('cache/datasets/words.txt'), 'one two')

    Source: https://keras.io/api/utils/python_utils/#get_file-function.
    """
    arguments.require_bool(untar=untar, extract=extract, force_download=force_download)
    if origin is None:
        raise ValueError("`origin` must be given: the URL of the file, or its path.")
    url = _url_of(origin)
    if md5_hash is not None and file_hash is None:
        file_hash, hash_algorithm = md5_hash, "md5"
    algorithm = _algorithm(file_hash, hash_algorithm)
    formats = ["tar"] if untar else _formats(archive_format)
    name = os.path.basename(urllib.parse.unquote(urllib.parse.urlsplit(url).path)) if fname is None else (
        arguments.as_path("fname", fname, "the name of a file"))
    if not name or name in (".", "..") or "/" in name or os.sep in name:
        raise ValueError(f"`fname` must be the name of a file in the cache folder, without folders: give these as "
                         f"`cache_dir` and `cache_subdir`. Received: {name!r}.")
    folder = os.path.join(os.path.expanduser(cache_home() if cache_dir is None else arguments.as_path(
        "cache_dir", cache_dir, "the path of a folder")),
                          arguments.as_path("cache_subdir", cache_subdir, "a folder in the cache folder"))
    if not (extract or untar):
        return _downloaded(url, os.path.join(folder, name), file_hash, algorithm, force_download)[0]
    # The same names as Keras's.
    if fname is not None and "." in name:
        target, extracted = name, f"{name[:name.find('.')]}_extracted"
    else:
        target, extracted = f"{name}_archive", name
    extracted = os.path.join(folder, extracted)
    if not force_download and os.path.isdir(extracted) and not os.path.exists(os.path.join(folder, target)):
        return extracted  # the archive was deleted to save space
    path, is_new = _downloaded(url, os.path.join(folder, target), file_hash, algorithm, force_download)
    if (is_new or not os.path.isdir(extracted)) and not archives.extract(path, extracted, formats):
        raise ValueError(f"{path!r} is no archive of the format {' or '.join(formats) or 'None'}. It is from {url}. "
                         "Give the `archive_format` that it has, or take it without `extract`.")
    return extracted


def _downloaded(url: str, path: str, file_hash: str | None, algorithm: str, force: bool) -> tuple[str, bool]:
    """Returns the path, and whether the file was downloaded now."""
    if not force and os.path.exists(path):
        if file_hash is None or _hash_of(path, algorithm) == file_hash.lower():
            return path, False
        print_message(f"{path!r} has another {algorithm} hash than the expected one, and is downloaded again.")
    folder, name = os.path.split(path)
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder)
    except OSError as error:
        raise type(error)(error.errno, f"The cache folder cannot be written: {error.strerror}. Give another one as "
                                       "`cache_dir`, or as the environment variable KERAS_HOME", folder) from error
    try:
        print_message(f"Downloading data from {url}")
        with open(descriptor, "wb") as file:
            found = _copy(url, file, hashlib.new(algorithm, usedforsecurity=False))
        if file_hash is not None and found != file_hash.lower():
            raise ValueError(f"What {url} gives has the {algorithm} hash {found}. Expected: {file_hash}. The file is "
                             "another one than was meant, or damaged; nothing of it was kept.")
        os.chmod(temporary, 0o666 & ~archives.umask())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
    return path, True


def _copy(url: str, file: Any, digest: Any) -> str:
    """Writes the content of a URL; returns its hash."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECS) as response:
            length = response.headers.get("Content-Length")
            target = int(length) if length is not None and length.isdigit() else None
            bar, count = Progbar(target or None, unit_name="byte"), 0
            while chunk := response.read(_CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                count += len(chunk)
                bar.update(count)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"{url} cannot be downloaded: the server says {error.code} ({error.reason}).") from error
    except urllib.error.URLError as error:
        kind = FileNotFoundError if isinstance(error.reason, FileNotFoundError) else OSError
        raise kind(f"{url} cannot be downloaded: {error.reason}. Without a network, put the file into the cache folder "
                   "yourself, or give its path as `origin`.") from error
    if target is not None and count != target:
        raise OSError(f"{url} cannot be downloaded: the connection ended after {count} of {target} bytes.")
    return digest.hexdigest()


def _url_of(origin: str | os.PathLike[str]) -> str:
    if not isinstance(origin, str) or "://" not in origin:
        path = arguments.as_path("origin", origin, "a URL or the path of a file")
        return _url_of("file://" + urllib.request.pathname2url(os.path.abspath(os.path.expanduser(path))))
    scheme, _, path, _, _ = urllib.parse.urlsplit(origin)
    local = urllib.request.url2pathname(path)
    if scheme.lower() == "file" and os.path.exists(local) and not os.path.isdir(local):
        open_file(local).close()  # an error for a pipe, a device or a socket
    if scheme.lower() not in _SCHEMES:
        raise ValueError(f"`origin` must be a URL that begins with {', '.join(_SCHEMES)}, or a path. Received: one "
                         f"that begins with {scheme}.")
    return origin


def _algorithm(file_hash: str | None, algorithm: str) -> str:
    arguments.check_word("hash_algorithm", algorithm, ("auto", *_DIGITS))
    if file_hash is None:
        return "sha256" if algorithm == "auto" else algorithm
    arguments.require_text(file_hash=file_hash)
    algorithm = next((name for name, digits in _DIGITS.items() if len(file_hash) == digits), "auto") if (
        algorithm == "auto") else algorithm
    if algorithm == "auto" or len(file_hash) != _DIGITS[algorithm] or set(file_hash.lower()) - set("0123456789abcdef"):
        raise ValueError("`file_hash` must be the 64 hexadecimal digits of a SHA-256 hash, or the 32 of an MD5 hash. "
                         f"Received: {len(file_hash)} characters, for the algorithm {algorithm!r}.")
    return algorithm


def _formats(archive_format: str | list[str] | None) -> list[str]:
    if archive_format is None:
        return []
    names = [archive_format] if isinstance(archive_format, str) else list(archive_format)
    for name in names:
        arguments.check_word("archive_format", name, ("auto", *archives.FORMATS))
    return list(archives.FORMATS) if "auto" in names else names


def _hash_of(path: str, algorithm: str) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
