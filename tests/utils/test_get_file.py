"""Files from URLs: where they lie, hashes, archives that try to leave their folder, and what an interruption leaves."""

import functools
import hashlib
import http.server
import io
import os
import pathlib
import re
import tarfile
import threading
import urllib.request
import zipfile

import pytest

from trainer import utils
from trainer.utils.files import get_file as module

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "jax")
    keras_utils = pytest.importorskip("keras").utils

TEXT = b"one two three\n"
SHA256, MD5 = hashlib.sha256(TEXT).hexdigest(), hashlib.md5(TEXT).hexdigest()


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "words.txt").write_bytes(TEXT)
    with tarfile.open(folder / "words.tar.gz", "w:gz") as archive:
        archive.add(folder / "words.txt", "inner/words.txt")
    with zipfile.ZipFile(folder / "words.zip", "w") as archive:
        archive.write(folder / "words.txt", "inner/words.txt")
    return folder


@pytest.fixture
def get(tmp_path):
    return functools.partial(utils.get_file, cache_dir=tmp_path / "cache")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(TEXT)
        else:
            super().do_GET()


@pytest.fixture
def url(source):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=source))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def contents(*path):
    return pathlib.Path(*path).read_bytes()


def left_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["path", "url", "http"])
def test_a_file_is_fetched_once(kind, source, url, get, tmp_path):
    origin = {"path": source / "words.txt", "url": (source / "words.txt").as_uri(), "http": f"{url}/words.txt"}[kind]
    path = get(origin=origin, file_hash=SHA256)
    assert path == str(tmp_path / "cache" / "datasets" / "words.txt")
    (source / "words.txt").write_bytes(b"other")
    assert contents(get(origin=origin)) == TEXT
    assert contents(get(origin=origin, force_download=True)) == b"other"
    assert left_in(tmp_path / "cache") == ["datasets/words.txt"]


@pytest.mark.parametrize("arguments", [
    {"origin": "words.txt"}, {"fname": "other", "origin": "words.txt"},
    {"fname": "words.tar.gz", "origin": "words.tar.gz", "extract": True},
    {"origin": "words.tar.gz", "extract": True}, {"fname": "texts", "origin": "words.tar.gz", "untar": True},
    {"fname": "texts", "origin": "words.zip", "extract": True, "archive_format": "zip"},
    {"origin": "words.txt", "cache_subdir": "other", "md5_hash": MD5},
])
def test_paths_are_kerass(arguments, source, tmp_path, monkeypatch):
    arguments = {**arguments, "origin": (source / arguments["origin"]).as_uri()}
    paths = []
    for name, function in (("keras", keras_utils.get_file), ("ours", utils.get_file)):
        (tmp_path / name).mkdir()
        path = function(**arguments, cache_dir=str(tmp_path / name))
        paths.append((os.path.relpath(path, tmp_path / name), left_in(tmp_path / name)))
    assert paths[0] == paths[1]


def test_the_cache_folder_is_kerass(source, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    assert utils.get_file(origin=source / "words.txt") == str(tmp_path / "home" / "datasets" / "words.txt")
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert module.cache_home() == str(tmp_path / "user" / ".keras")


@pytest.mark.parametrize(("file_hash", "algorithm"), [(SHA256, "auto"), (SHA256.upper(), "sha256"), (MD5, "auto"),
                                                      (MD5, "md5")])
def test_a_file_with_another_hash_is_fetched_again(file_hash, algorithm, source, get, tmp_path):
    cached = tmp_path / "cache" / "datasets" / "words.txt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"damaged")
    get(origin=source / "words.txt", file_hash=file_hash, hash_algorithm=algorithm)
    assert cached.read_bytes() == TEXT


def test_a_download_with_another_hash_leaves_what_was_there(source, get, tmp_path):
    with pytest.raises(ValueError, match=f"has the sha256 hash {SHA256}. Expected: {'0' * 64}"):
        get(origin=source / "words.txt", file_hash="0" * 64)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize(("path", "error", "message"), [
    ("/none", OSError, "/none cannot be downloaded: the server says 404"),
    ("/short", OSError, "the connection ended after 14 of 100 bytes"),
])
def test_a_failed_download_leaves_nothing(path, error, message, url, get, tmp_path):
    with pytest.raises(error, match=message):
        get(origin=url + path)
    assert left_in(tmp_path / "cache") == []


def test_a_server_that_is_not_there_is_named(get):
    with pytest.raises(OSError, match=r"http://127.0.0.1:1/x cannot be downloaded: .*Without a network, put the file"):
        get(origin="http://127.0.0.1:1/x")
    with pytest.raises(FileNotFoundError, match="cannot be downloaded"):
        get(origin="/there/is/no/such/file")


def test_ctrl_c_leaves_nothing(source, get, tmp_path, monkeypatch):
    class Interrupted:
        def __init__(self, *arguments, **kwargs):
            pass

        def update(self, count):
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "Progbar", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        get(origin=source / "words.txt")
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("archive", ["words.tar.gz", "words.zip"])
def test_an_archive_is_taken_apart_once(archive, source, get, monkeypatch):
    folder = get("texts", source / archive, extract=True)
    assert (contents(folder, "inner", "words.txt"), os.path.basename(folder)) == (TEXT, "texts")
    with open(os.path.join(folder, "mark"), "w"):
        pass
    assert get("texts", source / archive, extract=True) == folder and "mark" in os.listdir(folder)
    os.remove(folder + "_archive")  # to save space
    assert get("texts", source / archive, extract=True) == folder and "mark" in os.listdir(folder)
    get("texts", source / archive, extract=True, force_download=True)
    assert os.listdir(folder) == ["inner"]


def evil_tar(path, member):
    with tarfile.open(path, "w") as archive:
        if member == "link":
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "../../.."
            archive.addfile(link)
            member = "link/evil"
        entry = tarfile.TarInfo(member)
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"evil"))


def evil_zip(path, member):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "evil")


@pytest.mark.parametrize(("make", "member"), [(evil_tar, "../evil"), (evil_tar, "/tmp/../evil/../../evil"),
                                              (evil_tar, "link"), (evil_zip, "../evil"), (evil_zip, "/evil/evil")])
def test_no_member_leaves_its_folder(make, member, get, tmp_path):
    make(tmp_path / "evil.archive", member)
    with pytest.raises(ValueError, match=r"texts_archive' cannot be extracted: .*Nothing of it was kept"):
        get("texts", tmp_path / "evil.archive", extract=True)
    assert left_in(tmp_path) == ["cache/datasets/texts_archive", "evil.archive"]
    assert os.listdir(tmp_path / "cache" / "datasets") == ["texts_archive"]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({}, ValueError, "`origin` must be given"),
    ({"origin": "gs://bucket/x"}, ValueError, "Received: one that begins with gs"),
    ({"origin": "http://x/"}, ValueError, "`fname` must be the name of a file"),
    ({"origin": "http://x/y", "fname": "../y"}, ValueError, "`fname` must be the name of a file"),
    ({"origin": "http://x/y", "file_hash": "123"}, ValueError, "`file_hash` must be the 64 hexadecimal digits"),
    ({"origin": "http://x/y", "file_hash": "z" * 64}, ValueError, "`file_hash` must be the 64 hexadecimal digits"),
    ({"origin": "http://x/y", "hash_algorithm": "sha1"}, ValueError, "`hash_algorithm` must be one of"),
    ({"origin": "http://x/y", "archive_format": "rar"}, ValueError, "`archive_format` must be one of"),
    ({"origin": "http://x/y", "extract": 1}, TypeError, "`extract` must be True or False"),
])
def test_bad_arguments_are_named_before_anything_is_fetched(arguments, error, message, get, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    with pytest.raises(error, match=re.escape(message)):
        get(**arguments)


def test_what_is_no_archive_is_named(source, get):
    with pytest.raises(ValueError, match="is no archive of the format tar or zip"):
        get(origin=source / "words.txt", extract=True)
    with pytest.raises(ValueError, match="is no archive of the format zip"):
        get(origin=source / "words.tar.gz", extract=True, archive_format="zip")


def test_a_cache_folder_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"The cache folder cannot be written: .*KERAS_HOME"):
        utils.get_file(origin=source / "words.txt", cache_dir=tmp_path / "file")
