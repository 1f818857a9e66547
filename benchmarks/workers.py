"""The processes of a case's contestants, and the rounds in which they take turns.

Each contestant has a process of its own (`worker.py`), so that libraries, backends and numbers of simulated devices
never mix. Between its turns a worker waits for a line and costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from cases import Case, Contestant

TIMEOUT_SECS = 300
CACHE_VARIABLE = "BENCH_CACHE_DIR"  # of a folder with compiled programs, for the run after an interrupted run
_MAX_STARTING = 4


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of the workers.

    Attributes:
      platform: JAX's: "cpu", "gpu" or "tpu".
      devices: how many there are; on "cpu" any number is simulated.
      text: a sentence on the machine and the versions.
    """

    platform: str
    devices: int
    text: str

    @classmethod
    def probe(cls) -> Machine:
        """Returns this machine, from a process of its own: the parent of the workers must hold no device."""
        code = ("import json, jax, measuring; print(json.dumps([jax.default_backend(), jax.device_count(), "
                "measuring.environment()]))")
        done = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, check=True,
                              stdout=subprocess.PIPE, text=True)
        return cls(*json.loads(done.stdout.splitlines()[-1]))

    def described(self, replicas: int) -> str:
        """Returns the sentence for workers that see so many devices."""
        if self.platform != "cpu" or replicas == 1:
            return self.text
        return self.text.replace("one device", f"{replicas} simulated devices")

    def environment(self, replicas: int) -> dict[str, str]:
        """Returns the environment of a worker that sees so many devices."""
        # Without huge pages, two processes of one program differ by the pages that they happened to get.
        changed = {"BENCHMARK_PLATFORM": self.platform, "JAX_ENABLE_COMPILATION_CACHE": "false",
                   "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
                   "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                   "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
        if folder := os.environ.get(CACHE_VARIABLE):
            changed |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": folder,
                        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        if self.platform == "cpu":
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={replicas}"
            changed |= {"XLA_FLAGS": flags.strip()} if replicas > 1 else {}
        elif self.platform == "gpu":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.devices))))
            changed |= {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:replicas])}
        return os.environ | changed


class WorkerError(Exception):
    """A worker cannot go on."""


class Worker:
    """A contestant's process, as its parent sees it."""

    def __init__(
            self, case: str, name: str, contestant: Contestant, epochs: int, environment: Mapping[str, str]):
        python = sys.executable
        for module, variable in (("loops_tf", "TF_PYTHON"), ("loops_torch", "TORCH_PYTHON")):
            if contestant.loop.startswith(f"{module}:"):
                python = os.environ.get(variable, python)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(pathlib.Path(__file__).with_name("worker.py")), case, name, str(epochs)],
            env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True)  # Ctrl-C is for the parent, which then ends its workers

    def ask(self, line: str) -> None:
        """Sends a line, without waiting for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` finds out why
            print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
          WorkerError: if there is none, or if it is that the contestant cannot take part.
        """
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], TIMEOUT_SECS)[0]:
            raise WorkerError(f"no answer within {TIMEOUT_SECS} s")
        line = stream.readline()
        if not line:
            raise WorkerError(f"ended with exit status {self._process.wait()}: {self._last_error()}")
        answer = json.loads(line)
        for problem in ("unavailable", "failed"):
            if problem in answer:
                print(self._last_error() if problem == "failed" else "", end="", file=sys.stderr)
                raise WorkerError(f"{'skipped' if problem == 'unavailable' else problem}: {answer[problem]}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _last_error(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]


@dataclasses.dataclass
class Outcome:
    """The results of the rounds of a case.

    Attributes:
      rounds: of each contestant, the figures of its rounds: "seconds", "cpu_seconds", "steps", or "figure".
      notes: of a contestant, how it works or why it does not take part.
      starts: of a contestant, how many seconds it took until all was compiled.
      traces: of a contestant, the results of its trace, or the reason for its absence as "untraced".
    """

    rounds: dict[str, list[dict[str, float]]]
    notes: dict[str, str]
    starts: dict[str, float] = dataclasses.field(default_factory=dict)
    traces: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def measure(name: str, case: Case, machine: Machine, rounds: int, most_epochs: int | None, outcome: Outcome,
            traced: Sequence[str] = ()) -> None:
    """Runs the rounds of a case.

    They are split over sets of processes that follow each other, as two processes of one program can differ by the
    memory that they happened to get. A contestant that fails is dropped, with a note, and the others go on.

    Args:
      name: the case's.
      case: the case.
      machine: where.
      rounds: how many.
      most_epochs: of a round; None for the contestants' own numbers.
      outcome: filled round by round, so that an interruption loses none.
      traced: the contestants that are traced after the rounds.
    """
    sets, left = min(case.processes, rounds), dict(case.contestants)
    for number in range(sets):
        share = rounds // sets + (number < rounds % sets)
        _measure_in_new_processes(name, case, left, machine, share, most_epochs, random.Random(number), outcome, traced)


def _measure_in_new_processes(
    name: str, case: Case, left: dict[str, Contestant], machine: Machine, rounds: int, most_epochs: int | None,
    rng: random.Random, outcome: Outcome, traced: Sequence[str],
) -> None:
    environment = machine.environment(case.workload.replicas)
    scale = 1 if machine.platform == "cpu" else case.scale
    # XLA times kernels as it compiles for a GPU, which another process must not disturb.
    most_starting = min(_MAX_STARTING, os.cpu_count() or 1) if machine.platform == "cpu" else 1
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:

        def answer(who: str) -> dict[str, Any] | None:
            try:
                return workers[who].answer()
            except WorkerError as error:
                outcome.notes[who] = str(error)
                outcome.rounds.pop(who, None)
                del workers[who], left[who]
                return None

        def await_start(who: str) -> None:
            if ready := answer(who):
                outcome.starts[who] = ready["seconds"]
                print(f"{who}: ready after {ready['seconds']:.0f} s", file=sys.stderr, flush=True)

        waiting: list[str] = []
        for who, contestant in list(left.items()):
            if len(waiting) == most_starting:
                await_start(waiting.pop(0))
            epochs = min(scale * contestant.epochs, most_epochs or math.inf)
            workers[who] = Worker(name, who, contestant, epochs, environment | dict(contestant.environment))
            stack.callback(workers[who].close)
            waiting.append(who)
        for who in waiting:
            await_start(who)
        for who in list(workers):
            workers[who].ask("choose")
            chosen = answer(who)
            if chosen and chosen["chosen"]:
                outcome.notes[who] = chosen["chosen"]
        for _ in range(rounds):
            names, done = list(workers), {}
            rng.shuffle(names)  # so that none always follows the same contestant
            for who in names:
                workers[who].ask("run")
                if figures := answer(who):
                    done[who] = figures
            for who, figures in done.items():  # whole rounds only
                outcome.rounds.setdefault(who, []).append(figures)
        for who in traced:
            if who in workers:
                workers[who].ask("trace")
                if found := answer(who):
                    outcome.traces[who] = found
