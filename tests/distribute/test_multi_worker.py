"""Two processes with two devices each give one device's numbers, and save together if one is preempted."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import trainer
from tests.support import project_files
from tests.support.networks import LinenMLP, classification, logits_loss
from tests.support.strategy_cases import CustomStep
from trainer import callbacks as cb
from trainer import distribute
from trainer.testing import LocalCluster

pytestmark = pytest.mark.processes

X, Y, WEIGHTS = classification(45)
BATCH_SIZE = 8  # a last batch of 5 rows, which 4 replicas pad
FEWER_ROWS = 41  # a last batch of 1 row, which each replica computes


def generated():
    for _ in range(2):
        for start in range(0, FEWER_ROWS, BATCH_SIZE):
            yield X[start:min(start + BATCH_SIZE, FEWER_ROWS)], Y[start:min(start + BATCH_SIZE, FEWER_ROWS)]


def train(kind, folder):
    """Trains under the strategy; returns what a process then has."""
    strategy = {
        "sharded": lambda: distribute.FullyShardedStrategy(min_shard_bytes=0),
        "model parallel": lambda: distribute.ModelParallelStrategy(
            {"replica": jax.device_count() // 2, "model": 2}, layout_map={"Dense_0/kernel": (None, "model")}),
    }.get(kind, distribute.MultiWorkerMirroredStrategy)
    if kind == "model parallel":
        distribute.MultiWorkerMirroredStrategy()  # joins the cluster, so that the devices can be counted
    with strategy().scope():
        return fitted(kind, folder)


def fitted(kind, folder):
    """Trains a model under the strategy in scope."""
    strategy = distribute.get_strategy()
    model = (CustomStep if kind == "custom step" else trainer.Model)(LinenMLP(batch_norm=True), seed=1)
    model.compile(trainer.optimizers.SGD(0.1, momentum=0.9), logits_loss(), metrics=["accuracy"])
    rows = FEWER_ROWS if kind == "sharded" else len(X)
    data = {"x": generated(), "steps_per_epoch": 6} if kind == "generator" else {
        "x": X[:rows], "y": Y[:rows], "batch_size": BATCH_SIZE, "sample_weight": WEIGHTS if kind == "arrays" else None}
    backup = cb.BackupAndRestore(os.path.join(folder, "backup"), 3, delete_checkpoint=False)
    logger = cb.CSVLogger(os.path.join(folder, "log.csv"))
    best = cb.ModelCheckpoint(os.path.join(folder, "best.safetensors"), save_best_only=True, save_weights_only=True)
    history = model.fit(**data, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[backup, logger, best])
    return {
        "replicas": strategy.num_replicas_in_sync, "chief": jax.process_index() == 0,
        "weights": model.get_weights(), "history": history.history, "predictions": model.predict(X, verbose=0),
        "logs": model.evaluate(X, Y, verbose=0),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["arrays", "generator", "custom step", "sharded", "model parallel"])
def test_processes_give_the_numbers_of_one_device(kind, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with distribute.OneDeviceStrategy().scope():
        expected = fitted(kind, str(tmp_path / "one"))
    chief, other = LocalCluster(2, devices_per_worker=2).run(train, kind, str(tmp_path / "two"))
    assert chief["replicas"] == (2 if kind == "model parallel" else 4)
    assert (chief.pop("chief"), other.pop("chief")) == (True, False)
    assert jax.tree.structure(chief) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(chief), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two, err_msg="the processes differ")
    for name in ("weights", "history", "predictions", "logs"):
        for mine, theirs in zip(jax.tree.leaves(chief[name]), jax.tree.leaves(expected[name]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    files = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("one", "two")]
    assert files[0] == files[1] == ["backup", "best.safetensors", "log.csv"]


SCRIPT = """
import os, sys
import numpy as np
import trainer
from trainer import callbacks as cb
from trainer import distribute
from flax import linen as nn

x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)
strategy = trainer.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = trainer.Sequential([nn.Dense(8), nn.Dropout(0.2), nn.Dense(1)])
    model.compile("adam", "mse")
history = model.fit(x, y, epochs=3, batch_size=8, verbose=0, validation_split=0.2, callbacks=[
    cb.BackupAndRestore("backup", 2), cb.Callback()])
if strategy.is_chief:
    np.savez("result.npz", *model.get_weights(), **history.history)
"""


def launch(folder, *options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "trainer.launch", "--workers", "2", *options, "train.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def test_a_signal_to_one_process_saves_all_at_one_step(tmp_path):
    preempted = SCRIPT.replace("cb.Callback()", "Preempt()").replace("history =", """
import signal, time
class Preempt(cb.Callback):
    batches, is_preempted = 0, False
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 3 and not strategy.is_chief and not os.path.exists("preempted"):
            open("preempted", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
            self.is_preempted = True
        if self.is_preempted:
            time.sleep(0.2)  # JAX looks for the signal once a second
history =""")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "preempted").write_text("")  # so that it is not
    (tmp_path / "two").mkdir()
    results = []
    for folder, codes in (("one", [0]), ("two", [143, 0])):
        (tmp_path / folder / "train.py").write_text(preempted)
        for code in codes:
            done = launch(tmp_path / folder)
            assert done.returncode == code, done.stderr
        with np.load(tmp_path / folder / "result.npz") as arrays:
            results.append(dict(arrays))
    assert "Received SIGTERM" not in done.stderr
    for name, values in results[0].items():
        np.testing.assert_array_equal(values, results[1][name], err_msg=name)


def test_a_worker_that_fails_ends_the_job_with_its_traceback(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace(
        "history =", "if not strategy.is_chief: raise ValueError('only here')\nhistory ="))
    done = launch(tmp_path)
    assert done.returncode == 1
    assert "ValueError: only here" in done.stderr


# Within an epoch it is the watchdog that notices, if the other process waits for its step in the call.
@pytest.mark.parametrize(("batches", "says"), [
    (6, r"ClusterError: The data of worker 1 .* has run out of data: False in worker 0, True in worker 1\."),
    (5, r"batches of the epoch: 3 in worker 0, 2 in worker 1\.|the data of worker 1 have ended"),
])
def test_a_generator_that_ends_early_in_one_worker_is_named_and_not_started_again(tmp_path, batches, says):
    (tmp_path / "train.py").write_text(SCRIPT.partition("history =")[0] + f"""
from trainer.distribute.cluster.liveness.watchdog import watchdog
watchdog().timeout_secs = 6.0  # not before, as to start may take longer
watchdog()._star.wake()
number = 9 if strategy.is_chief else {batches}
model.fit(((x[:8], y[:8]) for _ in range(number)), epochs=3, steps_per_epoch=3, verbose=0)
""")
    done = launch(tmp_path, "--restarts", "3")
    assert done.returncode == 2, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert done.stderr.count("Gloo] Rank 0 is connected") <= 1, "it was not started again"


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    page = pathlib.Path(project_files.ROOT, "docs", "multi_worker.md").read_text()
    (tmp_path / "train.py").write_text(re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "weights.safetensors").exists()
