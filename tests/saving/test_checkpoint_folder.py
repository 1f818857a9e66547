"""A damaged checkpoint is never taken: each changed byte is noticed, the newest whole one found, nothing deleted."""

import copy
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time
import warnings

import jax.numpy as jnp
import pytest

from trainer.engine.saving.arrays import file_locks
from trainer.engine.saving.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    NewerFormatError,
    check_manifest,
    manifest,
    open_checkpoint,
    run_lock,
    write_manifest,
)


def fill(folder: CheckpointFolder, *steps: int) -> None:
    with CheckpointWriter() as checkpoints:
        for step in steps:
            checkpoints.save(folder.path_of(step), {"x": jnp.full(3, step)}, {"step": step})


def files_of(path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in pathlib.Path(path).rglob("*") if file.is_file())


def rewrite_manifest(path, **changes) -> None:
    """Writes a manifest as another version would have, with a digest that fits."""
    file = pathlib.Path(path) / "manifest.json"
    content = json.loads(file.read_text()) | changes
    del content["digest"]
    file.write_bytes(manifest._text({**content, "digest": manifest._digest(content)}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that no test changes."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("saved"))
    fill(folder, 3)
    return pathlib.Path(folder.path_of(3))


@pytest.fixture
def path(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "step_3"))


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "run")


@pytest.fixture
def read_only_folder():
    """A folder that this process may read but not write, with a whole checkpoint and a newer damaged one."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:  # pytest's are for one user alone
        place = os.path.join(folder, "run")
        fill(CheckpointFolder(place), 1)
        os.mkdir(os.path.join(place, "step_2"))
        for parent in (folder, place):
            os.chmod(parent, 0o555)
        as_root = os.geteuid() == 0
        if as_root:  # whom no mode keeps out
            os.seteuid(65534)
        try:
            yield place
        finally:
            if as_root:
                os.seteuid(0)
            for parent in (folder, place):
                os.chmod(parent, 0o755)


def test_every_file_of_a_checkpoint_is_in_its_manifest(saved):
    listed = json.loads((saved / "manifest.json").read_text())["files"]
    assert sorted([*listed, "manifest.json"]) == files_of(saved)
    assert {"document.json", "arrays.safetensors", "state/0.bytes", "state/0.json"} == listed.keys()


def test_a_changed_byte_in_any_file_is_noticed(path):
    checked = 0
    for name in files_of(path):
        whole = (path / name).read_bytes()
        for position in sorted({0, len(whole) // 3, len(whole) // 2, len(whole) - 1} & set(range(len(whole)))):
            changed = bytearray(whole)
            changed[position] ^= 1
            (path / name).write_bytes(changed)
            with pytest.raises(CheckpointError, match=f"step_3' is damaged: its file '{name}' has other bytes than"):
                check_manifest(path)
            checked += 1
        (path / name).write_bytes(whole)
    check_manifest(path)
    assert checked == 20


@pytest.mark.slow
def test_every_single_bit_of_a_manifest_matters(path):
    shutil.rmtree(path / "state")
    write_manifest(path)
    whole = (path / "manifest.json").read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[position] ^= 1 << bit
            (path / "manifest.json").write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"its file 'manifest.json' has other bytes") as caught:
                check_manifest(path)
            assert not isinstance(caught.value, NewerFormatError)


@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_file_that_is_cut_short_is_noticed(path, length):
    for name in files_of(path):
        whole = (path / name).read_bytes()
        if whole[:length] == whole:
            continue
        (path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=rf"its file '{name}' has (\d+ bytes instead of {len(whole)}|other)"):
            check_manifest(path)
        (path / name).write_bytes(whole)
    check_manifest(path)


def test_a_missing_file_is_noticed(path):
    for name in files_of(path):
        whole = (path / name).read_bytes()
        (path / name).unlink()
        with pytest.raises(CheckpointError, match=f"its file '{name}' is missing"):
            check_manifest(path)
        (path / name).mkdir()  # as an interrupted repair may leave it
        with pytest.raises(CheckpointError, match=f"its file '{name}' is missing"):
            check_manifest(path)
        (path / name).rmdir()
        (path / name).write_bytes(whole)
    shutil.rmtree(path / "state")
    with pytest.raises(CheckpointError, match=r"its file 'state/.*' is missing"):
        open_checkpoint(path)


def test_a_file_that_the_manifest_does_not_name_does_not_matter(path):
    (path / "notes.txt").write_text("mine")
    check_manifest(path)
    assert open_checkpoint(path).document == {"step": 3}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"digest": null}', b"[" * 10_000])
def test_a_manifest_of_something_else_is_damage(path, content):
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its file 'manifest.json' has other bytes"):
        check_manifest(path)


def test_a_newer_format_asks_for_an_upgrade(path):
    rewrite_manifest(path, format=3, files="of another form")
    for read in (check_manifest, open_checkpoint):
        with pytest.raises(NewerFormatError, match=r"step_3' was written by a newer version .* format 3, .* Upgrade"):
            read(path)


def test_what_was_checked_before_can_be_opened_without_a_check(path):
    (path / "manifest.json").unlink()
    assert open_checkpoint(path, verify=False).document == {"step": 3}


def test_the_newest_whole_checkpoint_is_found(folder):
    assert folder.newest_whole() is None and folder.steps() == []
    fill(folder, 2, 10, 9)
    assert folder.steps() == [2, 9, 10] and folder.newest_whole() == folder.path_of(10)


def test_foreign_and_temporary_names_are_no_checkpoints(folder, tmp_path):
    fill(folder, 5)
    for name in ("step_07", "step_", "step_8x", "Step_9", "step_-1", "step_٣", ".step_9.0123456789ab.tmp", "notes"):
        shutil.copytree(folder.path_of(5), tmp_path / "run" / name)
    (tmp_path / "run" / "step_99").write_text("a file")
    assert folder.steps() == [5] and folder.newest_whole() == folder.path_of(5)


@pytest.mark.parametrize(("damage", "file"), [
    (lambda path: (path / "document.json").write_text("{}"), "document.json"),
    (lambda path: os.truncate(path / "arrays.safetensors", 3), "arrays.safetensors"),
    (lambda path: (path / "state" / "0.json").unlink(), "state/0.json"),
    (lambda path: (path / "manifest.json").write_text(""), "manifest.json"),
    (lambda path: (shutil.rmtree(path), path.mkdir()), "manifest.json"),
], ids=["changed", "cut short", "missing", "empty file", "empty folder"])
def test_a_damaged_checkpoint_is_put_aside_with_a_warning_and_an_older_one_taken(folder, damage, file):
    fill(folder, 1, 2)
    damage(pathlib.Path(folder.path_of(2)))
    with pytest.warns(UserWarning, match=rf"step_2' is damaged: its file '{file}' .* It is renamed to 'corrupt_step_2'."
                                         r" Taking '.*step_1' instead"):
        assert folder.newest_whole() == folder.path_of(1)
    assert sorted(os.listdir(folder.path)) == ["corrupt_step_2", "step_1"]
    assert folder.newest_whole() == folder.path_of(1)  # now without a warning


def test_damaged_ones_are_put_aside_under_new_names(folder):
    fill(folder, 1)
    for _ in range(3):
        os.mkdir(folder.path_of(2))
        with pytest.warns(UserWarning, match="is damaged"):
            folder.newest_whole()
    assert sorted(os.listdir(folder.path)) == ["corrupt_step_2", "corrupt_step_2_2", "corrupt_step_2_3", "step_1"]


def test_if_none_is_whole_it_is_an_error_now_and_later(folder):
    fill(folder, 1, 2)
    for step in (1, 2):
        os.remove(os.path.join(folder.path_of(step), "document.json"))
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint in '.*run' is whole.*step_2' is damaged.*step_1' is"):
        folder.newest_whole()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
        folder.newest_whole()
    fill(folder, 3)
    assert folder.newest_whole() == folder.path_of(3)


def test_a_newer_format_is_an_error_and_the_checkpoint_stays(folder):
    fill(folder, 1, 2)
    rewrite_manifest(folder.path_of(2), format=3)
    with pytest.raises(NewerFormatError, match="Upgrade"):
        folder.newest_whole()
    assert folder.steps() == [1, 2]


def test_a_damaged_checkpoint_in_a_folder_that_cannot_be_written_is_skipped(read_only_folder):
    folder = CheckpointFolder(read_only_folder)
    with pytest.warns(UserWarning, match=r"step_2' is damaged.* It is skipped, and left where it is \(Permission .*"):
        assert folder.newest_whole() == folder.path_of(1)
    assert sorted(os.listdir(folder.path)) == ["step_1", "step_2"]


def test_a_folder_that_cannot_be_written_is_an_error_at_once(read_only_folder):
    with pytest.raises(PermissionError, match="step_3"):
        fill(CheckpointFolder(read_only_folder), 3)
    assert sorted(os.listdir(read_only_folder)) == ["step_1", "step_2"]


def test_prune_keeps_the_newest(folder):
    fill(folder, 1, 2, 3, 10)
    (pathlib.Path(folder.path) / "notes").mkdir()
    folder.prune()
    assert sorted(os.listdir(folder.path)) == ["notes", "step_10", "step_3"]
    folder.prune()
    assert folder.steps() == [3, 10]


def test_the_first_process_alone_prunes(folder, monkeypatch):
    fill(folder, 1, 2, 3)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    folder.prune()
    assert folder.steps() == [1, 2, 3]


def test_prune_after_each_save_never_leaves_less_than_one(folder, tmp_path):
    last = CheckpointFolder(tmp_path / "run", keep=1)
    seen = []
    with CheckpointWriter() as checkpoints:
        for step in range(4):
            checkpoints.save(last.path_of(step), {}, step, on_saved=lambda: (seen.append(last.steps()), last.prune()))
    assert seen == [[0], [0, 1], [1, 2], [2, 3]] and last.steps() == [3]


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_is_kept(tmp_path, keep):
    with pytest.raises(ValueError, match=f"`keep` must be 1 or more.* Received: {keep}"):
        CheckpointFolder(tmp_path, keep=keep)


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(folder):
    fill(folder, 1)
    names = [".step_2.0123456789ab.tmp", ".step_3.ffffffffffff.tmp", ".step_1.0123456789ab.old"]
    others = [".step_2.tmp", ".notes.0123456789ab.tmp", "corrupt_step_4", ".notes.0123456789ab.old", "notes"]
    for name in [*names, *others]:
        os.makedirs(os.path.join(folder.path, name, "state"))
    folder.acquire()
    folder.release()
    assert sorted(os.listdir(folder.path)) == sorted([*others, "step_1"])


def test_the_next_save_to_a_path_removes_what_killed_saves_to_it_have_left(tmp_path):
    names = [".state.000000000000.tmp", ".state.111111111111.tmp", ".other.000000000000.tmp"]
    for name in names:
        (tmp_path / name / "state").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - 60,) * 2)
    running = file_locks.open_locked(str(tmp_path / names[1]))
    with CheckpointWriter() as writer:
        writer.save(tmp_path / "state", {}, {})
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "state"])
    file_locks.close(running)


def test_links_to_checkpoints_are_read_and_removed_as_links(folder, tmp_path):
    fill(CheckpointFolder(tmp_path / "elsewhere"), 1, 2, 3)
    fill(folder, 4)
    for name, step in (("step_1", 1), ("step_2", 2), (".step_2.0123456789ab.tmp", 2), ("corrupt_step_3", 3)):
        os.symlink(tmp_path / "elsewhere" / f"step_{step}", os.path.join(folder.path, name))
    assert folder.steps() == [1, 2, 4]
    CheckpointFolder(folder.path, keep=2).prune()
    folder.acquire()
    assert folder.steps() == [2, 4] and folder.newest_whole() == folder.path_of(4)
    folder.delete()
    assert not os.path.exists(folder.path)
    assert CheckpointFolder(tmp_path / "elsewhere").steps() == [1, 2, 3]


def test_a_folder_is_one_runs_alone_until_it_is_released(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "_WAIT_SECS", 0.0)
    folder.acquire()
    folder.acquire()
    other = CheckpointFolder(folder.path)
    with pytest.raises(CheckpointError, match=rf"Another run saves to '.*': process {os.getpid()} on '.+', since '20.*"
                                              "Wait until it has ended, or give each run a folder of its own"):
        other.acquire()
    folder.release()
    other.acquire()
    other.delete()
    assert not os.path.exists(folder.path)
    other.acquire()
    other.release()
    assert os.listdir(folder.path) == []


def test_a_forked_process_leaves_the_folder_to_the_run(folder, monkeypatch):
    folder.acquire()
    child = copy.deepcopy(folder)
    with monkeypatch.context() as patch:
        patch.setattr(file_locks, "_open", set())  # the child's, which holds no locks
        child.release()
    assert run_lock.FILE_NAME in os.listdir(folder.path)
    folder.release()
    assert run_lock.FILE_NAME not in os.listdir(folder.path)


@pytest.mark.slow
def test_runs_that_start_while_another_ends_and_removes_its_folder_wait_for_it(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "_WAIT_SECS", 60.0)
    monkeypatch.setattr(run_lock, "_POLL_SECS", 0.0)
    holders, failures, ends = [], [], []

    def runs():
        try:
            for _ in range(60):
                mine = CheckpointFolder(folder.path)
                mine.acquire()
                holders.append(mine)
                assert holders == [mine]
                holders.remove(mine)
                mine.delete()
            ends.append(True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=runs) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failures, len(ends)) == ([], 4)
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_a_lock_that_does_not_say_whose_it_is_counts_too(folder, monkeypatch, content):
    monkeypatch.setattr(run_lock, "_WAIT_SECS", 0.0)
    folder.acquire()
    pathlib.Path(folder.path, run_lock.FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="a process that has not said which"):
        CheckpointFolder(folder.path).acquire()
    folder.release()


def test_a_checkpoint_that_was_being_replaced_gets_its_name_back(folder):
    fill(folder, 1, 2)
    os.rename(folder.path_of(2), os.path.join(folder.path, ".step_2.0123456789ab.old"))
    folder.acquire()
    assert folder.newest_whole() == folder.path_of(2)


def test_a_folder_that_cannot_be_made_or_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(OSError, match=r"cannot be written to the folder.*Give a folder that can be"):
            CheckpointFolder(path).acquire()


def test_the_working_folder_is_not_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CheckpointFolder(".").delete()
    assert tmp_path.is_dir()


def test_delete_removes_all_checkpoints_and_a_folder_without_anything_else(folder):
    fill(folder, 1, 2)
    for name in ("step_3", "corrupt_step_4", "corrupt_step_4_2", ".step_5.0123456789ab.tmp", "notes"):
        os.mkdir(os.path.join(folder.path, name))
    folder.delete()
    assert os.listdir(folder.path) == ["notes"]
    os.rmdir(os.path.join(folder.path, "notes"))
    folder.delete()
    folder.delete()
    assert not os.path.exists(folder.path) and folder.newest_whole() is None


def test_looking_at_whole_checkpoints_warns_of_nothing(folder):
    fill(folder, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.newest_whole() == folder.path_of(2)
