"""A job of two processes of which one was killed goes on to the bit, and a preempted one with any number of them."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support.waiting import GUARD_SECS
from trainer.testing import Kill, assert_resumes_exactly

pytestmark = pytest.mark.processes

LAUNCH = [sys.executable, "-m", "trainer.launch", "--workers", "2"]
TRAIN = """
import os, time
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
import numpy as np
from flax import linen as nn
import trainer
from trainer import callbacks

x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)  # a last batch of 2 rows
strategy = trainer.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = trainer.Sequential([nn.Dense(8), nn.Dropout(0.2), nn.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=1)
class Pause(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        # JAX looks for SIGTERM once a second.
        time.sleep(0.2 if os.environ.get("TRAINER_KILL_SIGNAL") == "15" else 0.0)
history = model.fit(x, x.sum(1, keepdims=True), epochs=3, batch_size=8, verbose=0, callbacks=[
    callbacks.BackupAndRestore("backup", 4), trainer.testing.kill_at(), Pause()])
if strategy.is_chief:
    np.savez("result.npz", *model.get_weights(), replicas=strategy.num_replicas_in_sync, **history.history)
"""
TRAIN_ALIKE = TRAIN.replace("Dropout(0.2", "Dropout(0.0")  # each replica draws masks of its own


def test_a_job_of_which_one_process_was_killed_resumes_to_the_bit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    assert_resumes_exactly([*LAUNCH, str(script)], [Kill(step=9, process=1), Kill(save=2, delay_secs=0.005)],
                           timeout_secs=120)


def test_a_preempted_training_has_the_exit_code_of_one_that_has_saved(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import os, sys
import numpy as np
if "TRAINER_KILL_AT_STEP" in os.environ:
    sys.exit(143)
np.savez("result.npz", same=np.ones(2))
""")
    command = [sys.executable, str(script)]
    assert_resumes_exactly(command, [Kill(step=3, signal=signal.SIGTERM)])
    with pytest.raises(RuntimeError, match=r"was not killed at Kill\(step=3.*ended with exit code 143"):
        assert_resumes_exactly(command, [Kill(step=3)])


# Process 0 begins a save, and writes down that the launcher has ended it, so that it was not the one that was killed.
SAVES_ONCE = """
import json, os, signal, sys, time
import numpy as np
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def end(*_):
    open("spared", "w").close()
    sys.exit(1)
if os.path.exists("output.txt") and not os.path.exists("spared"):  # the run that is to be killed
    if index == 0:
        signal.signal(signal.SIGTERM, end)
        os.mkdir(".step_1.0.tmp")
    time.sleep(999)
elif index == 0:
    np.savez("result.npz", **{"process 0 was spared": 1} if os.path.exists("spared") else {})
"""


def test_a_kill_within_a_save_hits_the_process_that_it_names(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SAVES_ONCE)
    with pytest.raises(AssertionError, match=r"differ: process 0 was spared\."):
        assert_resumes_exactly([*LAUNCH, str(script)], [Kill(save=0, process=1)], timeout_secs=GUARD_SECS)


def test_a_kill_of_a_process_that_there_is_not_is_an_error(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import numpy as np
from trainer.testing import kill_at
callback = kill_at()
callback.on_train_begin()
callback.on_epoch_begin(0)
callback.on_execution_end("train", 2, {})
np.savez("result.npz")
""")
    with pytest.raises(RuntimeError, match=r"Kill\(step=3.*ended with exit code 0.*Is there a process 1\?"):
        assert_resumes_exactly([sys.executable, str(script)], [Kill(step=3, process=1)])


def test_a_process_is_counted_from_zero_and_a_signal_is_one_that_ends():
    with pytest.raises(ValueError, match="`process` must be"):
        Kill(step=1, process=-1)
    with pytest.raises(ValueError, match=r"`signal` must be SIGKILL or SIGTERM. Received: .*SIGSTOP"):
        Kill(step=1, signal=signal.SIGSTOP)


def run(command, folder, code=0, **variables):
    """Runs a training in a folder; returns what it wrote."""
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, timeout=120, capture_output=True,
                          text=True)
    assert done.returncode == code, done.stderr
    if code == 0:
        with np.load(folder / "result.npz") as arrays:
            return dict(arrays)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return run([sys.executable, "-c", TRAIN_ALIKE], folder)


@pytest.mark.parametrize("processes", [2, 1])
def test_a_preempted_training_goes_on_with_another_number_of_processes(processes, undisturbed, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_ALIKE)
    commands = {1: [sys.executable, str(script)], 2: [*LAUNCH, str(script)]}
    run(commands[processes], tmp_path, code=143, TRAINER_KILL_AT_STEP="5", TRAINER_KILL_SIGNAL="15",
        TRAINER_KILL_PROCESS=str(processes - 1))
    assert not (tmp_path / "result.npz").exists()
    *in_turn, last = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "backup").glob("step_*"))
    assert in_turn == [4 * ((last - 1) // 4)] and last >= 5, "one checkpoint more, of one step"
    received = run(commands[3 - processes], tmp_path)
    assert received.pop("replicas") == 3 - processes
    assert received.keys() | {"replicas"} == undisturbed.keys()
    for name, values in received.items():
        np.testing.assert_allclose(values, undisturbed[name], rtol=1e-5, atol=1e-5, err_msg=name)
