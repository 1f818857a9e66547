"""Kills processes of parameter servers: `python benchmarks/parameter_server_crashes.py [--kills N] [part ...]`.

Half of the kills are of `workers`, several in each `fit`, which must go on. The `others` are of parameter servers,
after which the command must end with exit code 75, and of the chief, after which no process and no folder may be left;
then the same command is run again until it ends. The rows that are trained are those of an identity matrix, whose
gradients are the rows themselves: the weights are then how often each row was trained. The exit code is 1 if a row was
trained more or less often than once in an epoch, or a count is wrong.
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import optax
from flax import linen as nn
from measuring import table, write_section
from parameter_server import await_workers

import trainer
from trainer import callbacks, distribute
from trainer.core.ambient.processes import SentContext
from trainer.distribute.parameter_server.processes.failures import EXIT_CODE

ROWS, BATCH, SAVE_FREQ = 120, 4, 10
STEPS = ROWS // BATCH  # of an epoch
EPOCHS = 60
EPOCHS_AFTER = 3  # the kills of workers, with which a `fit` ends
WORKERS, SERVERS = 2, 2
KILLS_OF_A_FIT = 6  # of workers
CHAIN = 3  # kills of servers and of the chief, one after the other in the same folder
MOST_FAILURES = 5
TIMEOUT = 300.0  # seconds, of a process
ENDS_WITHIN = 20.0  # seconds, in which all processes must be gone after the chief
# Of Ray those that hold anything: its agents and workers in reserve end by themselves, after about a minute.
COUNTED = {"local": ("",), "ray": ("ray::RayHost", "/raylet/raylet", "/gcs_server")}
STARTUP = {"local": 8.0, "ray": 25.0}  # seconds that it takes, about


# --- the training -----------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Two parameters, one for each server, whose gradients are sums of rows."""

    @nn.compact
    def __call__(self, x):
        return sum(x @ self.param(name, nn.initializers.zeros, (ROWS,)) for name in ("one", "other"))


def processes_of(strategy: distribute.ParameterServerStrategy, role: str) -> list[int]:
    """Returns the ids of the processes of a role, as far as they are known."""
    slots = strategy.coordinator._slots
    if hasattr(strategy._servers[0], "_process"):
        handles = strategy._servers if role == "server" else [slot.handle for slot in slots]
        return [handle._process.pid for handle in handles]
    workers = [slot.handle.call("run", os.getpid, (), {}, SentContext()) for slot in slots]
    others = [pid for pid in descendants(os.getpid()) if "ray::RayHost" in command_of(pid) and pid not in workers]
    return workers if role == "worker" else others


class Killer(callbacks.Callback):
    """Kills processes of a role at random moments of a `fit`, or this one at any moment from now on."""

    def __init__(self, strategy: Any, role: str, kills: int, rng: random.Random, longest: float):
        self._strategy, self._role, self._rng, self._longest = strategy, role, rng, longest
        self._left, self.made = kills, 0
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._epochs_after = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._thread.start()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._role == "worker" and self.made and not self._thread.is_alive():
            self._epochs_after += 1
            self.model.stop_training = self._epochs_after == EPOCHS_AFTER

    def _kill(self) -> None:
        while self._left:
            self._left -= 1
            # Most often all workers run, but some are killed while others, or they themselves, start again.
            if self._role == "worker" and (self._left % 3 or not self.made):
                await_workers(self._strategy.coordinator)
            time.sleep(self._rng.uniform(0, self._longest))
            try:
                pid = os.getpid() if self._role == "chief" else self._rng.choice(
                    processes_of(self._strategy, self._role))
                os.kill(pid, signal.SIGKILL)
                self.made += 1
            except (ConnectionError, ProcessLookupError):  # it is being replaced
                self._left += 1


def train(folder: pathlib.Path, engine: str, role: str, kills: int, seed: int) -> None:
    """Trains in a folder, from a backup if there is one, and kills meanwhile; writes the counts and weights."""
    rng = random.Random(seed)
    if role == "chief" and rng.random() < 0.3:  # also while processes start
        Killer(None, role, kills, rng, STARTUP[engine]).on_train_begin()
        kills = 0
    address = None if engine == "local" else "local"
    with distribute.ParameterServerStrategy(num_workers=WORKERS, num_ps=SERVERS, address=address) as strategy:
        with strategy.scope():
            model = trainer.Model(Sums())
            # Two parameters of the same gradient: each moves by one for each row.
            model.compile(optax.sgd(1.0), lambda y_true, y_pred: -y_pred * BATCH)
        killer = Killer(strategy, role, kills, rng, {"worker": 2.5, "server": 3.0, "chief": 3.0}[role])
        x, y = np.eye(ROWS, dtype=np.float32), np.zeros(ROWS)
        endless = role == "worker" and kills
        history = model.fit(x, y, batch_size=BATCH, epochs=10_000 if endless else EPOCHS, verbose=0, callbacks=[
            killer, callbacks.BackupAndRestore(folder / "backup", save_freq=SAVE_FREQ, delete_checkpoint=False)])
        weights = np.stack(list(model.state.params.values()))
        (folder / "result.json").write_text(json.dumps({
            "kills": killer.made, "epochs": len(history.epoch) if endless else EPOCHS,
            "steps": int(model.state.step), "updates": int(model.state.opt_state.count),
            "least": float(weights.min()), "most": float(weights.max())}))


# --- the runs ---------------------------------------------------------------------------------------------------------


def command_of(pid: int) -> str:
    """Returns a process's command line; empty if it is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def descendants(pid: int) -> set[int]:
    """Returns the ids of all processes below a process."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
    below = collections.defaultdict(list)
    for line in found.stdout.splitlines():
        child, parent, state = line.split()
        if not state.startswith("Z"):
            below[int(parent)].append(int(child))
    todo, every = [pid], set()
    while todo:
        children = below[todo.pop()]
        every.update(children)
        todo += children
    return every


class Training:
    """A training in a folder of its own, whose temporary files are there too."""

    def __init__(self, engine: str):
        self._engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="ps-", ignore_cleanup_errors=True)
        self.path = pathlib.Path(self._folder.name)
        self.problems: list[str] = []

    def run(self, role: str, kills: int, seed: int) -> int:
        """Runs it and returns its exit code."""
        (self.path / "t").mkdir(exist_ok=True)
        command = [sys.executable, __file__, "--train", str(self.path), "--engine", self._engine, "--role", role,
                   "--kills", str(kills), "--seed", str(seed)]
        environment = {**os.environ, "TMPDIR": str(self.path / "t")}
        begin, seen = time.monotonic(), {}
        with open(self.path / "log", "w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            while process.poll() is None:
                seen |= {pid: command_of(pid) for pid in descendants(process.pid)}
                if time.monotonic() - begin > TIMEOUT:
                    self.problems.append(f"hung for {TIMEOUT:g} s")
                    process.kill()
                time.sleep(0.1)
        ended = time.monotonic()
        seen = {pid: line for pid, line in seen.items() if line and any(name in line for name in COUNTED[self._engine])}
        while (left := [pid for pid, line in seen.items() if command_of(pid) == line]) and (
                time.monotonic() - ended < ENDS_WITHIN):
            time.sleep(0.1)
        if left:
            self.problems.append(f"left {[command_of(pid)[:100] for pid in left]}")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        folders = glob.glob(str(self.path / "t" / "trainer-ps-*"))
        if folders:
            self.problems.append(f"left {folders}")
        return process.returncode

    def check(self, expected: int, code: int) -> None:
        """Notes an unexpected exit code, with the output."""
        if code != expected:
            self.problems.append(f"ended with exit code {code}, not {expected}:\n{(self.path / 'log').read_text()}")

    def result(self) -> dict[str, Any]:
        """Returns the files of an ended training, once they are checked."""
        result = json.loads((self.path / "result.json").read_text())
        made = {name: result[name] for name in ("steps", "updates", "least", "most")}
        epochs = result["epochs"]
        wanted = {"steps": epochs * STEPS, "updates": epochs * STEPS, "least": epochs, "most": epochs}
        if made != wanted:
            self.problems.append(f"has {made}, not {wanted}")
        return result


def kill_workers(engine: str, kills: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """Trains once while workers are killed; returns the kills and the mistakes."""
    training = Training(engine)
    code = training.run("worker", kills, rng.randrange(10**6))
    training.check(0, code)
    return [] if code else training.result()["kills"] * ["worker"], training.problems


def kill_others(engine: str, roles: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Trains until servers or the chief were killed, and to the end; returns the kills and the mistakes."""
    training, made = Training(engine), []
    for role in roles:
        code = training.run(role, 1, rng.randrange(10**6))
        if code == 0:  # before the kill
            break
        training.check(EXIT_CODE if role == "server" else -signal.SIGKILL, code)
        made.append(role)
    else:
        code = training.run("worker", 0, 0)
        training.check(0, code)
    if code == 0:
        training.result()
    return made, training.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["others", "workers", []], default=[], help="both by default")
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--kills", type=int, default=60, help="of both parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--role", default="worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.engine, options.role, options.kills, options.seed)
        return
    parts, begin = options.parts or ["others", "workers"], time.monotonic()
    made: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    trainings = 0
    rng = random.Random(options.seed)
    others = ["server", "chief"] * (options.kills // 4)
    rng.shuffle(others)
    others = others if "others" in parts else []
    workers = options.kills // 2 if "workers" in parts else 0
    while len(failures) < MOST_FAILURES and (others or made["worker"] < workers):
        if others:
            killed, problems = kill_others(options.engine, others[:CHAIN], rng)
            others = others[len(killed) or CHAIN:]
        else:
            killed, problems = kill_workers(options.engine, min(KILLS_OF_A_FIT, workers - made["worker"]), rng)
        made.update(killed)
        trainings += 1
        print(f"{time.monotonic() - begin:.0f} s: {dict(made)}", *problems, sep="\n", flush=True)
        failures.extend(problems[:1])
    rows = [[role, made[role], after] for role, after in (
        ("worker", "`fit` goes on"), ("server", "exit code 75, then the same command resumes"),
        ("chief", "no process is left, then the same command resumes")) if made[role]]
    engine = "processes of this machine" if options.engine == "local" else "Ray's actors"
    ours = "" if options.engine == "local" else (
        " Ray's own agents, which end by themselves about a minute after a chief that was killed, are not counted.")
    command = " ".join(["--engine", options.engine, "--kills", str(options.kills), "--seed", str(options.seed), *parts])
    write_section(f"Parameter servers on {engine}, killed: {' and '.join(parts)}", f"""
`kill -9` of processes of a ParameterServerStrategy on {engine}, {WORKERS} workers and {SERVERS} servers, at random
moments of `fit`: epochs of {STEPS} steps, `BackupAndRestore(save_freq={SAVE_FREQ})`; of the chief also while processes
start: `python benchmarks/parameter_server_crashes.py {command}`.
Rows are those of an identity matrix and gradients are the rows, so that weights are how often each was trained.
It took {time.monotonic() - begin:.0f} s.

{table(["killed", "times", "what must follow"], rows)}
{trainings} trainings were run to their end, {len(failures)} of them with something wrong. In the others, each epoch has
made {STEPS} updates and trained each row once, and once a command had ended, killed or not, no process and no folder of
it was left.{ours}""")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
