"""Processes that are killed: a worker's work is done again, a server's end is an error, a chief's end ends all."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import optax
import pytest
from flax import linen as nn

import trainer
from tests.support.waiting import until
from trainer import callbacks, distribute

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:worker:UserWarning")]


class Sum(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.zeros, (64,))


def rows():
    return np.eye(64, dtype=np.float32), np.zeros(64, np.float32)


def made(strategy):
    with strategy.scope():
        model = trainer.Model(Sum())
        model.compile(optax.sgd(1.0), lambda y_true, y_pred: -8.0 * y_pred)
    return model


def pids(strategy):
    return [slot.handle._process.pid for slot in strategy.coordinator._slots]


def test_a_fit_whose_workers_are_killed_trains_each_row_once():
    class Kill(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch % 2:
                victim = pids(self.model.strategy)[epoch // 2 % 2]
                threading.Timer(0.01, os.kill, (victim, signal.SIGKILL)).start()

    with distribute.ParameterServerStrategy(num_workers=2, num_ps=1) as strategy:
        model = made(strategy)
        model.fit(*rows(), batch_size=8, epochs=6, verbose=0, callbacks=[Kill()])
        assert int(model.state.step) == 48
        np.testing.assert_allclose(model.state.params["w"], 6.0, rtol=1e-6)


def test_a_worker_that_does_not_end_is_named_and_replaced():
    with tempfile.TemporaryDirectory() as folder, distribute.ParameterServerStrategy(
            num_workers=1, num_ps=1, worker_timeout=8.0) as strategy:
        def hang_at_first():
            first = pathlib.Path(folder, "first")
            if not first.exists():
                first.touch()
                time.sleep(1000)
            return 5

        strategy.coordinator.schedule(int, (1,)).fetch()
        with pytest.warns(UserWarning, match=r"worker 0 did not end `hang_at_first` within 8 s"):
            assert strategy.coordinator.schedule(hang_at_first).fetch() == 5


def test_a_lost_server_is_an_error_that_says_how_to_go_on():
    with distribute.ParameterServerStrategy(num_workers=2, num_ps=2) as strategy:
        model = made(strategy)
        model.fit(*rows(), batch_size=8, epochs=1, verbose=0)
        strategy._servers[0]._process.kill()
        with pytest.raises(distribute.ParameterServerLostError, match=r"ps 0 has ended.*BackupAndRestore"):
            model.fit(*rows(), batch_size=8, epochs=1, verbose=0)
        assert int(model.state.step) == 8, "the last that was fetched"


SCRIPT = """
import os, signal, sys, threading
import numpy as np
import trainer
from tests.distribute.test_parameter_server_failures import made, rows
from trainer import callbacks, distribute

class Kill(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and sys.argv[1] != "nothing":
            strategy = self.model.strategy
            victim = os.getpid() if sys.argv[1] == "chief" else strategy._servers[0]._process.pid
            print(strategy._engine._folder, *[h._process.pid for h in strategy._engine._handles], flush=True)
            os.kill(victim, signal.SIGKILL)

if __name__ == "__main__":
    with distribute.ParameterServerStrategy(num_workers=1, num_ps=1) as strategy:
        model = made(strategy)
        model.fit(*rows(), batch_size=8, epochs=4, verbose=0,
                  callbacks=[callbacks.BackupAndRestore(sys.argv[2], delete_checkpoint=False), Kill()])
        print(int(model.state.step), float(np.ptp(model.state.params["w"])), float(model.state.params["w"][0]))
"""


def run(victim, folder):
    root = pathlib.Path(trainer.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT), victim, str(folder)], env=environment,
                          capture_output=True, text=True, timeout=200, check=False)


def is_running(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("victim", "code"), [("server", 75), ("chief", -signal.SIGKILL)])
def test_the_same_command_goes_on_after_a_server_or_the_chief_is_killed(tmp_path, victim, code):
    ended = run(victim, tmp_path / "backup")
    assert ended.returncode == code, ended.stderr
    folder, *processes = ended.stdout.split()
    until(lambda: not any(map(is_running, processes)) and not os.path.exists(folder))
    again = run("nothing", tmp_path / "backup")
    assert again.returncode == 0, again.stderr
    step, spread, weight = map(float, again.stdout.split())
    assert (step, spread, weight) == (32, 0, pytest.approx(4.0, rel=1e-6))
