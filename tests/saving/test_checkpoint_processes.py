"""Killed, failing and several processes leave whole checkpoints, and nothing else under the names of checkpoints."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support import project_files
from tests.support.waiting import GUARD_SECS
from trainer.engine.saving.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    open_checkpoint,
    run_lock,
)

pytestmark = pytest.mark.processes

SAVE_FOR_EVER = """
import itertools, sys
import jax.numpy as jnp
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter
folder = CheckpointFolder(sys.argv[1])
with CheckpointWriter() as checkpoints:
    for step in itertools.count():
        arrays = {str(index): jnp.full(50_000, step, jnp.float32) for index in range(4)}
        checkpoints.save(folder.path_of(step), arrays, {"step": step}, on_saved=folder.prune)
        print("saving", step, flush=True)
"""

SAVE_ON_A_FULL_DISK = """
import os, resource, sys
import jax.numpy as jnp, numpy as np
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter
folder = CheckpointFolder(sys.argv[1])
checkpoints = CheckpointWriter()
checkpoints.save(folder.path_of(1), {"x": jnp.ones(9)}, None)
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
large = {"x": np.random.default_rng(0).random(100_000)}
for arrays, document in (({"x": jnp.asarray(large["x"])}, None), ({}, large)):
    checkpoints.save(folder.path_of(2), arrays, document)
    try:
        checkpoints.wait()
    except OSError as error:
        print(error, os.listdir(folder.path), flush=True)
checkpoints.save(folder.path_of(3), {"x": jnp.ones(9)}, None)
checkpoints.close()
print(folder.steps())
"""

EXIT = """
import os, sys
import jax.numpy as jnp
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter
folder = CheckpointFolder(sys.argv[1])
arrays = {str(index): jnp.ones((1000, 1000)) for index in range(4)}
try:
    with CheckpointWriter() as checkpoints:
        checkpoints.save(folder.path_of(1), arrays, None)
        sys.exit("in the middle")
finally:
    print("step 1", os.path.isdir(folder.path_of(1)), flush=True)
    CheckpointWriter().save(folder.path_of(2), arrays, None)
"""

ONE_OF_TWO = """
import os, sys, warnings
path, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from trainer.engine.saving.checkpoint import CheckpointFolder, CheckpointWriter, open_checkpoint
mesh = Mesh(np.array(jax.devices()), ("d",))
values = np.arange(32, dtype=np.float32).reshape(8, 4)
def on(spec):
    return jax.make_array_from_callback((8, 4), NamedSharding(mesh, spec), lambda part: values[part])
arrays = {"rows": on(P("d")), "all": on(P())}
folder = CheckpointFolder(path)
with CheckpointWriter() as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(folder.path_of(step), arrays, {"step": step}, on_saved=folder.prune)
    checkpoints.wait()
    others = CheckpointFolder(path + "_of_another_writer")
    with CheckpointWriter() as other:  # two that save at once would wait for each other for ever
        for step in (1, 2):
            other.save(others.path_of(step), arrays, None)
            checkpoints.save(folder.path_of(3), arrays, {"step": 3}, replace=True)
    checkpoints.wait()
    print("steps", folder.steps(), others.steps())
    restored = open_checkpoint(folder.newest_whole(), verify=False).restore({"rows": on(P()), "all": on(P(None, "d"))})
    for array in restored.values():
        assert all(np.array_equal(shard.data, values[shard.index]) for shard in array.addressable_shards)
    if index == 0:
        os.truncate(os.path.join(folder.path_of(3), "document.json"), 1)
    with warnings.catch_warnings(record=True):
        print("newest", os.path.basename(folder.newest_whole()))
    def save_half():
        from trainer.engine.saving.checkpoint import array_shards
        if index == 1:
            array_shards.write_shards = lambda *_: os.stat("/none/of/it")
        checkpoints.save(folder.path_of(5), arrays, None)
        checkpoints.wait()
    for save in (lambda: checkpoints.save(folder.path_of(2), arrays, None),
                 lambda: (checkpoints.save(folder.path_of(4), arrays, None, on_saved=lambda: 1 / 0),
                          checkpoints.wait()), save_half):
        try:
            save()
        except Exception as error:
            print(type(error).__name__, error)
"""


def start(script: str, *arguments, devices: int = 1) -> subprocess.Popen:
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], cwd=project_files.ROOT, text=True,
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(process: subprocess.Popen) -> tuple[str, str]:
    try:
        return process.communicate(timeout=GUARD_SECS)
    finally:
        process.kill()


def test_a_process_killed_while_it_saves_leaves_whole_checkpoints_and_hidden_folders(tmp_path):
    chance = random.Random(0)
    for attempt in range(3):
        folder = CheckpointFolder(tmp_path / str(attempt))
        with start(SAVE_FOR_EVER, folder.path) as process:
            while process.stdout.readline() != "saving 2\n":
                assert process.poll() is None
            time.sleep(chance.uniform(0, 0.3))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        visible = [name for name in os.listdir(folder.path) if not name.startswith(".")]
        assert sorted(visible) == sorted(f"step_{step}" for step in folder.steps())
        for step in folder.steps():
            checkpoint = open_checkpoint(folder.path_of(step))
            assert checkpoint.document == {"step": step} and len(checkpoint.specs) == 4
        assert folder.newest_whole() == folder.path_of(folder.steps()[-1])
        folder.acquire()
        folder.release()
        assert sorted(os.listdir(folder.path)) == sorted(visible)


def test_a_killed_save_leaves_a_hidden_folder_that_the_next_run_removes(tmp_path):
    stop = """
import os
from trainer.engine.saving.checkpoint import writer
writer.write_manifest = lambda *_: os.kill(os.getpid(), 9)
"""
    with start(stop + SAVE_FOR_EVER, tmp_path) as process:
        assert process.wait(GUARD_SECS) == -signal.SIGKILL
    [left] = os.listdir(tmp_path)
    assert re.fullmatch(r"\.step_0\.[0-9a-f]{12}\.tmp", left)
    folder = CheckpointFolder(tmp_path)
    assert folder.newest_whole() is None
    with CheckpointWriter() as checkpoints:
        checkpoints.save(folder.path_of(0), {}, None)
    folder.acquire()
    folder.release()
    assert os.listdir(tmp_path) == ["step_0"]


def test_a_full_disk_is_an_error_of_that_save_alone_and_leaves_nothing_of_it(tmp_path):
    with start(SAVE_ON_A_FULL_DISK, tmp_path) as process:
        output, log = finished(process)
    assert process.returncode == 0, log
    *failures, steps = output.splitlines()
    assert len(failures) == 2 and steps == "[1, 3]"
    for failure in failures:
        assert re.search(r"step_2' could not be saved: File too large \['step_1'\]", failure)


def test_a_process_that_exits_finishes_its_save_in_a_with_statement_and_reports_one_that_nobody_waits_for(tmp_path):
    with start(EXIT, tmp_path) as process:
        output, log = finished(process)
    assert process.returncode == 1 and "in the middle" in log and output == "step 1 True\n"
    steps = CheckpointFolder(tmp_path).steps()
    assert [name for name in sorted(os.listdir(tmp_path)) if name[0] != "."] == [f"step_{step}" for step in steps]
    for step in steps:
        assert len(open_checkpoint(tmp_path / f"step_{step}").specs) == 4
    # The second can be faster than the exit.
    assert steps == [1, 2] or "The process ends without `close` of its CheckpointWriter" in log


def test_two_processes_save_and_restore_one_checkpoint(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [start(ONE_OF_TWO, tmp_path, port, index, devices=2) for index in range(2)]
    results = [finished(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    # Gloo prints between them, in pieces.
    first, second = (re.findall(r"^(?:steps|newest|\w+Error) .*$", output,
                                re.MULTILINE) for output, _ in results)
    assert first[:2] == second[:2] == ["steps [2, 3] [1, 2]", "newest step_2"]
    assert re.fullmatch("FileExistsError There is something at '.*step_2' already.*", first[2])
    assert re.fullmatch("CheckpointError Process 0 has failed: There is something at '.*step_2' already.*", second[2])
    assert first[3] == "ZeroDivisionError division by zero"
    assert second[3].startswith("CheckpointError Process 0 could not do its part of a checkpoint.")
    assert re.fullmatch("CheckpointError .*step_5' could not .*: process 1 could not write its part.", first[4])
    assert re.fullmatch("FileNotFoundError .*step_5' could not be saved: No such file or directory", second[4])
    assert not [name for name in os.listdir(tmp_path) if "step_5" in name]
    restored = open_checkpoint(tmp_path / "step_2").specs
    assert restored == {"rows": ((8, 4), np.dtype("float32")), "all": ((8, 4), np.dtype("float32"))}


HOLDS_A_FOLDER = """
import os, sys, time
from trainer.engine.saving.checkpoint import CheckpointFolder

folder = CheckpointFolder(sys.argv[1])
folder.acquire()
if os.fork() == 0:  # as a loader of data that outlives its parent
    os.close(1)
    time.sleep(999)
print(os.getpid(), flush=True)
time.sleep(999)
"""


def test_a_folder_is_held_until_its_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_WAIT_SECS", 0.5)
    folder = CheckpointFolder(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_FOLDER, folder.path], stdout=subprocess.PIPE, text=True,
                          cwd=project_files.ROOT, start_new_session=True) as process:
        try:
            holder = int(process.stdout.readline())
            with pytest.raises(CheckpointError, match=f"Another run saves to .*: process {holder} on "):
                folder.acquire()
            process.kill()
            process.wait()
            assert os.path.exists(os.path.join(folder.path, run_lock.FILE_NAME))
            folder.acquire()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    folder.release()
    assert os.listdir(folder.path) == []


STARTS_AGAIN_AND_AGAIN = """
import sys
from trainer.engine.saving.checkpoint import CheckpointFolder, run_lock

run_lock._WAIT_SECS, run_lock._POLL_SECS = 600.0, 0.0
for _ in range(200):
    folder = CheckpointFolder(sys.argv[1])
    folder.acquire()
    folder.delete()
"""


@pytest.mark.slow
def test_many_starts_in_one_folder_wait_for_each_other(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", STARTS_AGAIN_AND_AGAIN, str(tmp_path / "run")],
                                  stderr=subprocess.PIPE, text=True, cwd=project_files.ROOT) for _ in range(3)]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert ends == [("", 0)] * 3
    assert os.listdir(tmp_path) == []
