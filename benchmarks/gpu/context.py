"""What all stages know: where they run, how long they may take, and where their results go."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

from cases import Case
from gpu.peaks import peak_flops
from gpu.results import Results
from workers import Machine

BENCHMARKS = pathlib.Path(__file__).parents[1]


def run_python(*arguments: str, timeout_secs: float = 240.0) -> dict:
    """Returns the JSON that a process of Python, which runs in the folder of the benchmarks, prints last.

    Raises:
      RuntimeError: if it fails, with the end of what it wrote.
    """
    done = subprocess.run([sys.executable, *arguments], cwd=BENCHMARKS, capture_output=True, text=True,
                          timeout=timeout_secs)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@dataclasses.dataclass(frozen=True)
class Context:
    """What a stage is given.

    Attributes:
      machine: its platform, and how many devices it has.
      device_kind: JAX's name of the devices.
      tiny: whether this is a dry run.
      results: what the stage adds to.
    """

    machine: Machine
    device_kind: str
    tiny: bool
    results: Results

    @property
    def prefix(self) -> str:
        """What the names of the cases begin with."""
        return "tiny " if self.tiny else ""

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of a device at most; None if that is not known."""
        return peak_flops(self.device_kind)

    def over_all_devices(self, case: Case) -> Case:
        """Returns a case whose workers see all devices."""
        return dataclasses.replace(case, workload=dataclasses.replace(case.workload, replicas=self.machine.devices))
