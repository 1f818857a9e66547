"""A process with the role of the evaluator, beside a training in other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support.waiting import GUARD_SECS
from trainer.distribute.cluster.description.cluster_resolver import VARIABLE as TF_CONFIG

pytestmark = pytest.mark.processes

SCRIPT = """
import json, pathlib, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
from flax import linen as nn
import trainer
from trainer import callbacks, distribute

is_evaluator = distribute.TFConfigClusterResolver().task_type == "evaluator"
strategy = distribute.OneDeviceStrategy() if is_evaluator else distribute.MultiWorkerMirroredStrategy()
x, y = np.random.default_rng(0).normal(size=(2, 64, 4)).astype(np.float32)
with strategy.scope():
    model = trainer.Sequential([nn.Dense(8), nn.tanh, nn.Dense(4)])
    model.compile("adam", "mse", ema_decay=0.5)
seen = pathlib.Path("seen")
if is_evaluator:
    touch = callbacks.LambdaCallback(on_test_end=lambda logs: seen.touch())
    sidecar = distribute.SidecarEvaluator(model, (x, y), "backup", callbacks=touch, poll_secs=0.05, timeout_secs=600)
    result = {"history": sidecar.start(), "has_evaluated_end": sidecar.has_evaluated_end}
    pathlib.Path("evaluator.json").write_text(json.dumps(result))
else:
    losses = {}
    def on_epoch_end(epoch, logs):
        losses[4 * (epoch + 1)] = model.evaluate(x, y, verbose=0)["loss"]
        while epoch == 2 and not seen.exists():
            time.sleep(0.05)
    model.fit(x, y, batch_size=16, epochs=5, verbose=0, callbacks=[
        callbacks.LambdaCallback(on_epoch_end=on_epoch_end),
        callbacks.BackupAndRestore("backup", delete_checkpoint=sys.argv[1] == "deletes"), trainer.testing.kill_at()])
    pathlib.Path("training.json").write_text(json.dumps(losses))
"""


def start(tmp_path, role, argument, **variables):
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": role, "index": 0}}
    return subprocess.Popen([sys.executable, "script.py", argument], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, TF_CONFIG: json.dumps(config), **variables})


@pytest.mark.parametrize(("argument", "is_killed"), [("keeps", True), ("deletes", False)])
def test_a_process_with_the_role_follows_a_training_that_may_be_killed_and_go_on(tmp_path, argument, is_killed):
    (tmp_path / "script.py").write_text(SCRIPT)
    sidecar = start(tmp_path, "evaluator", argument)
    processes = [sidecar]
    try:
        if is_killed:
            processes.append(start(tmp_path, "worker", argument, TRAINER_KILL_AT_STEP="18"))
            assert processes[-1].wait(GUARD_SECS) == -signal.SIGKILL
        processes.append(start(tmp_path, "worker", argument))
        for process in (processes[-1], sidecar):
            output, _ = process.communicate(timeout=GUARD_SECS)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    result = json.loads((tmp_path / "evaluator.json").read_text())
    expected = {int(step): loss for step, loss in json.loads((tmp_path / "training.json").read_text()).items()}
    done = [entry["step"] for entry in result["history"]]
    assert done == sorted(set(done)) and len(done) >= 1
    assert [line.split(",")[0] for line in output.splitlines() if line.startswith("step")] == [
        f"step {step}" for step in done]
    for entry in result["history"]:
        assert entry["epoch"] == entry["step"] // 4
        if entry["step"] in expected:  # else it is of before the kill
            np.testing.assert_allclose(entry["loss"], expected[entry["step"]], rtol=1e-6)
    assert (tmp_path / "backup").exists() == (argument == "keeps")
    if argument == "keeps":
        assert result["has_evaluated_end"] and done[-1] == 20
    elif not result["has_evaluated_end"]:
        assert "deleted its checkpoints before its last state was evaluated" in output.splitlines()[-1]
