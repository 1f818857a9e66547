"""The context of all stages: their machine, their time limits, and the destination of their results."""

from __future__ import annotations

import dataclasses

from cases import Case
from gpu.peaks import peak_flops
from gpu.results import Results
from workers import Machine


@dataclasses.dataclass(frozen=True)
class Context:
    """The input of a stage.

    Attributes:
      machine: its platform, and how many devices it has.
      device_kind: JAX's name of the devices.
      tiny: whether this is a dry run.
      results: results to which the stage adds.
      rounds: how many each case has; None for its own number.
      without: the contestants that are left out.
    """

    machine: Machine
    device_kind: str
    tiny: bool
    results: Results
    rounds: int | None = None
    without: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """The beginning of the names of the cases."""
        return "tiny " if self.tiny else ""

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of a device at most; None if that is not known."""
        return peak_flops(self.device_kind)

    def over_all_devices(self, case: Case) -> Case:
        """Returns a case whose workers see all devices."""
        return dataclasses.replace(case, workload=dataclasses.replace(case.workload, replicas=self.machine.devices))
