"""Checkpoints and files in an object store, which fsspec's memory stands for."""

import contextlib
import os
import re
import sys

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.object_stores import leftovers
from trainer.core import files
from trainer.core.files import storage
from trainer.engine.saving.arrays.safetensors_file import read_arrays, save_arrays
from trainer.engine.saving.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    data_folder,
    object_store,
    open_checkpoint,
)

STORE = fsspec.filesystem("memory")


@pytest.fixture
def place():
    yield "memory://bucket/here [1]*?"  # nothing in it is a pattern
    STORE.store.clear()
    STORE.pseudo_dirs[:] = [""]


def save(path, value, **arguments):
    with CheckpointWriter() as writer:
        writer.save(path, {"x": jnp.full((3, 4), value), "none": jnp.zeros((0, 2))}, {"value": value}, **arguments)


def value_at(path):
    checkpoint = open_checkpoint(path)
    found = checkpoint.restore(checkpoint.targets_here())
    assert (found["x"] == checkpoint.document["value"]).all() and found["none"].shape == (0, 2)
    return checkpoint.document["value"]


def is_cut(number, monkeypatch, path, value):
    """Saves in place of a checkpoint; after that many changes of the store nothing changes, as of a killed process."""
    class Killed(BaseException):
        pass

    changes = []

    def counted(change):
        def changing(*args, **kwargs):
            changes.append(1)
            if len(changes) > number:
                raise Killed
            return change(*args, **kwargs)

        return changing

    with monkeypatch.context() as patch:
        for name in ("pipe_file", "put_file", "rm_file"):
            patch.setattr(type(STORE), name, counted(getattr(type(STORE), name)))
        with contextlib.suppress(Killed):
            save(path, value, replace=True)
    return len(changes) > number


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread of a cut save
def test_a_save_in_place_of_another_can_be_cut_anywhere(place, monkeypatch):
    path, found = f"{place}/state", []
    save(path, 0)
    for number in range(20):
        is_over = not is_cut(number, monkeypatch, path, number + 1)
        found.append(value_at(path) == number + 1)
        if is_over:
            break
        save(path, number + 1, replace=True)
        assert value_at(path) == number + 1 and leftovers(place) == []
    # Before the manifest is replaced there is the former checkpoint, from then on the new one.
    assert found == sorted(found) and found[0] is False and found[-1] is True and 3 <= number < 20
    assert len(STORE.find(path)) == 5


def test_what_a_cut_save_left_is_removed_and_a_damaged_checkpoint_is_kept(place):
    folder = CheckpointFolder(place, keep=2)
    for step in (1, 2, 3):
        save(folder.path_of(step), step)
    STORE.pipe_file(f"{folder.path_of(4)}/data.0123456789ab/state/0.bytes", b"part")
    STORE.pipe_file(f"{folder.path_of(3)}/data.0123456789ab/document.json", b"part")
    STORE.pipe_file(f"{data_folder(folder.path_of(3))}/state/0.bytes", b"other bytes")
    assert folder.steps() == [1, 2, 3]
    with pytest.warns(UserWarning, match=r"step_3' is damaged.*left there without its manifest. Taking 'memory://buck"):
        assert folder.newest_whole() == folder.path_of(2)
    folder.acquire()
    assert folder.steps() == [1, 2] and not storage.exists(folder.path_of(4))
    assert storage.exists(f"{folder.path_of(3)}/damaged_manifest.json")
    folder.check_is_held()
    save(folder.path_of(3), 3, replace=True)
    folder.prune()
    assert folder.steps() == [2, 3] and leftovers(place) == [] and value_at(folder.newest_whole()) == 3
    folder.delete()
    assert STORE.find("bucket") == []


def test_a_folder_of_damaged_checkpoints_alone_is_an_error_and_of_cut_saves_is_new(place):
    folder = CheckpointFolder(place)
    STORE.pipe_file(f"{folder.path_of(4)}/data.0123456789ab/state/0.bytes", b"part")
    assert folder.newest_whole() is None
    save(folder.path_of(1), 1)
    STORE.pipe_file(f"{data_folder(folder.path_of(1))}/document.json", b"other")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"No checkpoint in 'memory://bucket/here.*' is whole"):
            folder.newest_whole()


def test_the_newest_run_has_a_folder_and_the_former_finds_out(place):
    first, second = CheckpointFolder(place), CheckpointFolder(place)
    first.acquire()
    first.check_is_held()
    second.acquire()
    with pytest.raises(CheckpointError, match=r"was taken by another run: process \d+ on .*#folder-in-use"):
        first.check_is_held()
    first.release()
    second.check_is_held()
    second.release()
    assert STORE.find("bucket") == []


def test_what_is_no_checkpoint_is_not_replaced(place):
    save(f"{place}/a", 1)
    with pytest.raises(FileExistsError, match="Save elsewhere, or pass `replace=True`"):
        save(f"{place}/a", 2)
    STORE.pipe_file(f"{place}/b/notes.txt", b"mine")
    for path in (f"{place}/b", f"{place}/b/notes.txt"):
        with pytest.raises(FileExistsError, match="is not a checkpoint, so it is not replaced"):
            save(path, 2, replace=True)
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint 'memory://bucket/here.*/c'"):
        open_checkpoint(f"{place}/c")


def test_two_saves_to_a_path_at_once_do_not_make_a_checkpoint_of_neither(place):
    folder = object_store.begin(place, replace=True)
    storage.write_object(f"{folder}/document.json", b"{}")
    save(place, 1, replace=True)  # which takes the files of the other for leftovers
    with pytest.raises(CheckpointError, match=r"'document.json' has no bytes instead of 2\. Does another process"):
        object_store.put_in_place(folder, place, {"document.json": {"size": 2, "sha256": "0"}})
    assert value_at(place) == 1


def test_a_copy_on_the_disk_is_a_checkpoint(place, tmp_path):
    save(f"{place}/state", 7)
    for path in STORE.find(f"{place}/state"):
        copy = tmp_path / "copy" / path.partition("/state/")[2]
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(STORE.cat_file(path))
    assert value_at(tmp_path / "copy") == 7


def test_a_hostile_manifest_does_not_lead_elsewhere(place):
    from trainer.engine.saving.checkpoint import manifest

    files.replace_file(f"{place}/manifest.json", manifest.text_of({}, "../other"))
    with pytest.raises(ValueError, match="names a folder outside of the checkpoint"):
        open_checkpoint(place)


def test_a_store_that_is_not_reached_is_no_missing_and_no_damaged_checkpoint(place, monkeypatch):
    folder = CheckpointFolder(place)
    save(folder.path_of(1), 1)

    def unreachable(*args, **kwargs):
        raise ConnectionResetError("reset by peer")

    for name in ("info", "ls"):
        with monkeypatch.context() as patch:
            patch.setattr(type(STORE), name, unreachable)
            with pytest.raises(ConnectionResetError, match=r"memory://bucket/here.*reset by peer"):
                folder.newest_whole()
    with monkeypatch.context() as patch:
        patch.setattr(type(STORE), "cat_file", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(5, "slow down")))
        with pytest.raises(OSError, match="slow down"):
            folder.newest_whole()
    assert folder.newest_whole() == folder.path_of(1)


def test_weights_are_written_whole_and_read(place, monkeypatch):
    path = f"{place}/weights.safetensors"
    arrays = {"a": np.arange(5.0), "b": np.zeros((0, 3), np.int8)}
    save_arrays(path, arrays, {"note": "text"}, checksums=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(OSError, match="no space"):
            save_arrays(path, {"a": np.zeros(5)})
    with read_arrays(path) as found:
        assert found.metadata == {"note": "text"}
        np.testing.assert_equal(dict(found), arrays)


def test_an_object_that_is_not_written_to_its_end_is_not_there(place):
    def write():
        with files.new_file(f"{place}/part") as file:
            file.write(b"some")
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        write()
    assert not storage.exists(f"{place}/part")


def test_an_object_is_read_from_any_position(place, monkeypatch):
    monkeypatch.setattr(storage, "_REQUEST_BYTES", 7)
    content = bytes(range(100))
    storage.write_object(f"{place}/object", content)
    with files.open_file(f"{place}/object") as file:
        assert file.seek(0, os.SEEK_END) == 100 and file.read() == b""
        assert file.seek(40) == 40 and file.read(30) == content[40:70]
        assert file.seek(-60, os.SEEK_CUR) == 10 and file.read() == content[10:]
    for path in (f"{place}/none", place):
        with pytest.raises(FileNotFoundError):
            files.open_file(path)


@pytest.mark.parametrize(("value", "error", "message"), [
    ("http://a/b", ValueError, r"a URL of an object store \(s3, .*Received: 'http://a/b'"),
    ("S3://a/b", ValueError, "Received: 'S3://a/b'"), ("s3://", ValueError, "Received: 's3://'"),
    ("file:///a", ValueError, "Received: 'file:///a'"), ("s3:/a", ValueError, "local file system. Received: 's3:/a'"),
    ("", ValueError, "must be a path"), (3, TypeError, "must be a path"),
])
def test_other_urls_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        storage.as_place("folder", value, "a path")


@pytest.mark.parametrize(("url", "missing", "packages"), [
    ("memory://a", "fsspec", "'trainer-jax[remote]'"), ("s3://a", "s3fs", "'trainer-jax[remote]' s3fs"),
    ("gs://a/b", "gcsfs", "'trainer-jax[remote]' gcsfs")])
def test_a_missing_driver_names_its_packages(monkeypatch, url, missing, packages):
    monkeypatch.setitem(sys.modules, missing, None)
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, url.partition(":")[0], raising=False)  # another test has opened it
    with pytest.raises(ImportError, match=re.escape(f"packages that are not installed: `pip install {packages}`")):
        storage.as_place("folder", url)


def test_an_error_without_a_number_names_none(place):
    STORE.makedirs(f"{place}/folder")
    with pytest.raises(IsADirectoryError) as raised:
        storage.write_object(f"{place}/folder", b"")
    assert f"{place}/folder" in str(raised.value) and "Errno" not in str(raised.value)
