"""Trainings in two real processes, one of which is struck by a fault; with and without a launcher.

Owns the training, its start, the fault and the watch. The tests state the required outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

from tests.support.rendezvous_cluster import free_port
from tests.support.waiting import GUARD_SECS, LONG_SECS, until
from trainer.core.errors import see
from trainer.engine.saving.checkpoint import CheckpointFolder, open_checkpoint

LIMIT_SECS = 5.0  # of the watchdogs, where they are to notice that a process is silent or stalls
HEARTBEAT_SECS = 0.3
STEPS, EPOCHS, SAVE_FREQ = 12, 2, 3
FAULT_STEP = 17  # in the middle of the second epoch
SAVED_STEPS = (12, 15)  # the second may be incomplete
DATA_ERROR = "RuntimeError: The data pipeline raised KeyError at batch 4: 'a row that is not there'"
DATA_NOTE = see("data-pipeline")

SCRIPT = f"""
import json, os, signal, sys, time
import numpy as np
from flax import linen as nn
import trainer
from trainer import callbacks as cb
from trainer.distribute.cluster.liveness import diagnosis, watchdog

diagnosis._MAX_HEARTBEAT_SECS = {HEARTBEAT_SECS}
fault, place = sys.argv[1], int(sys.argv[2])
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
is_struck = place in (index, -1) and not os.path.exists("struck")

def note(name, text=""):
    with open(name + ".new", "w") as file:
        file.write(text)
    os.rename(name + ".new", name)

def strike():
    note("struck")
    if fault == "block":
        time.sleep({LONG_SECS})
    if fault == "raise":
        raise KeyError("a row that is not there")
    if fault == "exit":
        sys.exit(3)
    os.kill(os.getpid(), getattr(signal, fault))

def batches():
    rng = np.random.default_rng(0)
    for number in range(1, {STEPS * EPOCHS} + 1):
        if is_struck and fault in ("block", "raise") and number == {FAULT_STEP}:
            strike()
        x = rng.normal(size=(7, 4)).astype(np.float32)
        yield x, x.sum(1, keepdims=True)

class Strikes(cb.Callback):
    state_attributes = ("step",)
    # Else the processes wait for each other after each batch, beside the devices.
    stops_consistently = fault not in ("raise", "save")
    trained = 0

    def on_train_begin(self, logs=None):
        self.step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step, self.trained = self.step + 1, self.trained + 1
        if fault in ("block", "exit", "save", "SIGSTOP"):  # the end of a process is noticed at once
            watchdog.watchdog().timeout_secs = {LIMIT_SECS}  # not before: to start and to compile takes long
        if not is_struck or self.step != {FAULT_STEP}:
            return
        if fault.startswith("SIG"):
            sent = watchdog.watchdog()._heartbeats
            while watchdog.watchdog()._heartbeats < sent + 2:  # so that the other one gets to know this step
                time.sleep(0.01)
            strike()
        if fault == "exit":
            strike()
        if fault == "save":
            with self.model.current_run.timing.checkpoint:
                time.sleep({1.4 * LIMIT_SECS})
        if fault == "wait":
            note(f"waiting_{{index}}", json.dumps([os.getpid(), os.environ["TF_CONFIG"]]))
            while not os.path.exists("struck"):
                time.sleep(0.01)

options = trainer.distribute.CommunicationOptions(timeout_seconds={LONG_SECS})
strategy = trainer.distribute.MultiWorkerMirroredStrategy(options)
with strategy.scope():
    model = trainer.Sequential([nn.Dense(8), nn.Dropout(0.2), nn.Dense(1)])
    model.compile(trainer.optimizers.SGD(0.01, momentum=0.9), "mse", steps_per_execution=1)
strikes = Strikes()
history = model.fit(batches(), epochs={EPOCHS}, steps_per_epoch={STEPS}, verbose=0, callbacks=[
    cb.BackupAndRestore("backup", {SAVE_FREQ}, delete_checkpoint=False), strikes])
np.savez(f"result_{{index}}.npz", *model.get_weights(), **history.history)
note(f"trained_{{index}}", str(strikes.trained))
"""

LAUNCHER = f"""
import functools, signal, sys
from trainer import launch
from trainer.launch import command
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests' own parent does with Ctrl-C
command.supervise = functools.partial(command.supervise, failure_grace_secs={LONG_SECS})  # nobody is killed for it
sys.exit(launch.main(sys.argv[1:]))
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended; `left` is whether something that it started has not."""

    code: int
    stderr: str
    left: bool


@dataclasses.dataclass(frozen=True)
class Struck:
    """The remains of a training that a fault struck.

    `step` and `document` are the step and the contents, without arrays, of the newest checkpoint.
    """

    folder: pathlib.Path
    address: str
    processes: list[Ended]
    port_is_free: bool
    is_over: bool
    step: int
    document: dict


def environment(**changes):
    # One device for each process; the other flags, which make programs compile fast, stay.
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    inherited = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "TRAINER_JOB_ID")}
    return {**inherited, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **changes}


def can_listen(address):
    """Tells whether a program can listen on a port, as the next start of the job will."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True


def group_is_left(group):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def state_of(pid):
    """Returns the kernel's letter for the state of a process; "" without such a process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Scenarios:
    """Starts processes, each in a session of its own, and ends those that are left."""

    def __init__(self, root):
        self._root = root
        self._processes = []

    def folder(self, name):
        folder = self._root / name
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        return folder

    def popen(self, command, folder, name, **variables):
        with open(folder / f"stdout_{name}", "wb") as out, open(folder / f"stderr_{name}", "wb") as err:
            process = subprocess.Popen(command, cwd=folder, env=environment(**variables), stdin=subprocess.DEVNULL,
                                       stdout=out, stderr=err, start_new_session=True)
        self._processes.append(process)
        return process

    def pair(self, folder, address, fault, place):
        """Trains in two processes until both have ended by themselves, or one process was suspended."""
        addresses = [address, "127.0.0.1:1"]  # nobody listens on the second address
        processes = [self.popen([sys.executable, "train.py", fault, str(place)], folder, index, TF_CONFIG=json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})) for index in range(2)]
        if fault == "SIGSTOP":
            processes[1 - place].wait(GUARD_SECS)
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[place].pid, signal.SIGCONT)
        return [Ended(process.wait(GUARD_SECS), (folder / f"stderr_{index}").read_text(), group_is_left(process.pid))
                for index, process in enumerate(processes)]

    def struck(self, fault, place):
        folder, address = self.folder(f"{fault}_{place}"), f"127.0.0.1:{free_port()}"
        processes = self.pair(folder, address, fault, place)
        return self._after(folder, address, processes)

    @staticmethod
    def _after(folder, address, processes):
        step = max(CheckpointFolder(folder / "backup").steps())
        newest = open_checkpoint(folder / "backup" / f"step_{step}")  # raises if it is not whole
        return Struck(folder, address, processes, can_listen(address), any(folder.glob("result_*")), step,
                      newest.document)

    def struck_and_resumed(self, fault, place):
        struck = self.struck(fault, place)
        return struck, self.pair(struck.folder, struck.address, fault, place)

    def saved_for_long(self):
        folder = self.folder("saved_for_long")
        return folder, self.pair(folder, f"127.0.0.1:{free_port()}", "save", 0)

    def launcher(self, folder, *arguments):
        """Starts the launcher with two workers."""
        return self.popen([sys.executable, "-c", LAUNCHER, "--workers", "2", *arguments], folder, "launcher")

    def launched(self, name, *options):
        """Starts a job whose processes wait in the middle of it; returns the launcher and the workers' messages."""
        folder = self.folder(name)
        launcher = self.launcher(folder, *options, "train.py", "wait", "-1")
        notes = [folder / f"waiting_{index}" for index in range(2)]
        until(lambda: all(note.exists() for note in notes) or launcher.poll() is not None)
        workers = [json.loads(note.read_text()) for note in notes]
        address = json.loads(workers[0][1])["cluster"]["worker"][0]
        return folder, launcher, [pid for pid, _ in workers], address

    def worker_killed_under_launcher(self):
        folder, launcher, pids, _ = self.launched("restarts", "--restarts", "1")
        os.kill(pids[1], signal.SIGKILL)
        (folder / "struck").touch()
        launcher.wait(GUARD_SECS)
        return folder, launcher.returncode, (folder / "stderr_launcher").read_text()

    def worker_raises_under_launcher(self):
        folder = self.folder("launched_raise")
        code = self.launcher(folder, "train.py", "raise", "1").wait(GUARD_SECS)
        return code, (folder / "stderr_launcher").read_text()

    def launcher_signalled(self, number):
        """Returns the launcher's exit code, as soon as no worker is left, nor their port taken."""
        _, launcher, pids, address = self.launched(f"launcher_{number}")
        os.kill(launcher.pid, number)
        launcher.wait(GUARD_SECS)
        # Who adopts the workers of a killed launcher may never reap them.
        until(lambda: all(state_of(pid) in ("", "Z") for pid in pids) and can_listen(address))
        return launcher.returncode

    def close(self):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
