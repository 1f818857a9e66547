"""The cost of a train step on GPUs: the report of `trainer.plan(model, sample, topology)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer.core.ambient.notebook import as_folded_html
from trainer.core.units import columns, readable_bytes, readable_number
from trainer.tools.plan.roofline import Roofline, SentRow


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device in bytes, at the peak of an execution.

    Attributes:
      parameters, optimizer_state, model_state: parts of the state.
      batches: batches of the execution.
      other_arguments: logs, numbers and padding of arrays.
      temporary: gradients, activations, and other buffers during a step.
      results: results in their own buffers, not donated by an argument.
      batches_ahead: batches that `fit` sends ahead of use.
      gradients: the reduced gradients, a part of `temporary` as far as they exist at the same time.
    """

    parameters: int
    optimizer_state: int
    model_state: int
    batches: int
    other_arguments: int
    temporary: int
    results: int
    batches_ahead: int
    gradients: int

    @property
    def step(self) -> int:
        """The memory of an execution: its arguments, its results and its temporary buffers."""
        return (self.parameters + self.optimizer_state + self.model_state + self.batches + self.other_arguments
                + self.temporary + self.results)

    @property
    def peak(self) -> int:
        """The memory of `fit`: an execution, and the batches placed ahead."""
        return self.step + self.batches_ahead


@dataclasses.dataclass(frozen=True)
class Alternative:
    """The cost of an alternative way to train.

    Attributes:
      change: the change.
      peak_bytes: as `DeviceMemory.peak`; None if it could not be compiled.
      fits: whether the peak is below the memory of a device.
      step_secs: the time of a step by the roofline model.
      problem: the reason why it could not be compiled.
    """

    change: str
    peak_bytes: int | None = None
    fits: bool = False
    step_secs: float | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a train step on GPUs that may be absent; its text is a table.

    Attributes:
      model: the model's name.
      strategy: the strategy, without its devices.
      topology: the GPUs, such as "8xh100".
      device: the name of a GPU.
      num_devices: number of GPUs.
      num_replicas: number of replicas.
      batch_rows: rows per batch, over all replicas.
      fused_steps: number of steps per execution.
      memory: the memory use of a device.
      device_bytes: the memory of a GPU in bytes.
      memory_fraction: the fraction of it that JAX allocates.
      collectives: the communication of a step.
      flops: floating-point operations per step and device.
      product_flops: operations of products and convolutions, by the dtype of the computation.
      traffic_bytes: bytes per step that kernels read and write in a device's memory.
      kernels: number of kernels per step, without collectives.
      roofline: the minimum time of a step.
      unknown_loops: number of loops with a trip count that only the device knows: it asks the host before each
        iteration.
      host_transfers: number of instructions that send to the host, or receive from it.
      assumptions: the assumptions of the numbers.
      alternatives: the costs of changes.
    """

    model: str
    strategy: str
    topology: str
    device: str
    num_devices: int
    num_replicas: int
    batch_rows: int
    fused_steps: int
    memory: DeviceMemory
    device_bytes: int
    memory_fraction: float
    collectives: tuple[SentRow, ...]
    flops: float
    product_flops: Mapping[str, float]
    traffic_bytes: float
    kernels: float
    roofline: Roofline
    unknown_loops: int
    host_transfers: int
    assumptions: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()

    @property
    def available_bytes(self) -> int:
        """The memory of a device that JAX allocates, in bytes."""
        return int(self.device_bytes * self.memory_fraction)

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        return self.memory.peak <= self.available_bytes

    @property
    def rows_per_sec(self) -> float:
        """Maximum number of rows per second by the roofline model."""
        return self.batch_rows / self.roofline.step

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON data: numbers, strings, lists and dicts."""
        return {
            **dataclasses.asdict(self),
            "product_flops": dict(self.product_flops),
            "memory": {**dataclasses.asdict(self.memory), "step": self.memory.step, "peak": self.memory.peak},
            "collectives": [row._asdict() for row in self.collectives],
            "roofline": {**self.roofline._asdict(), "step": self.roofline.step, "bound": self.roofline.bound,
                         "without_overlap": self.roofline.without_overlap},
            "assumptions": list(self.assumptions),
            "alternatives": [dataclasses.asdict(each) for each in self.alternatives],
            "available_bytes": self.available_bytes, "fits": self.fits, "rows_per_sec": self.rows_per_sec,
        }

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({self.model!r}, {self.strategy!r}, {self.topology!r}, "
                f"peak_bytes={self.memory.peak}, fits={self.fits})")

    def _repr_html_(self) -> str:
        return as_folded_html(repr(self), str(self))

    def __str__(self) -> str:
        title = (f"{self.model} under {self.strategy} on {self.topology} ({self.device}): batches of "
                 f"{self.batch_rows} rows, {_count(self.num_replicas, 'replica')}")
        sections = [self._memory_lines(), self._collective_lines(), self._time_lines(), self._alternative_lines(),
                    ["Assumed", *(f"- {line}" for line in self.assumptions)]]
        rule = "-" * min(max(len(line) for lines in sections[:-1] for line in [title, *lines]), 120)
        return f"\n{rule}\n".join([title, *("\n".join(lines) for lines in sections if lines)])

    def _memory_lines(self) -> list[str]:
        memory = self.memory
        rows = [("Parameters", memory.parameters), ("Optimizer state", memory.optimizer_state),
                ("Model state", memory.model_state), ("Batches", memory.batches),
                ("Logs and numbers", memory.other_arguments), ("Gradients, activations, temporary", memory.temporary),
                ("Results without an argument's buffer", memory.results), ("Peak of a step", memory.step),
                ("Batches sent ahead", memory.batches_ahead), ("Peak", memory.peak)]
        notes = {"Gradients, activations, temporary": f"the gradients alone: {readable_bytes(memory.gradients)}",
                 "Batches": f"of {_count(self.fused_steps, 'fused step')}" if self.fused_steps > 1 else "",
                 "Peak": f"{'fits into' if self.fits else 'does not fit into'} {readable_bytes(self.available_bytes)}, "
                         f"{100 * self.memory_fraction:.3g} % of the device's {readable_bytes(self.device_bytes)}"}
        return columns([("Bytes of a device", "", ""),
                         *((name, readable_bytes(size), notes.get(name, "")) for name, size in rows)], (1,))

    def _collective_lines(self) -> list[str]:
        if not self.collectives:
            return ["Collectives of a step: none"]
        titles = ("Collectives of a step", "Devices", "Hosts", "Count", "With work beside", "Arrays", "A device sends",
                  "Least time")
        rows = [(row.kind, str(row.devices), str(row.hosts), f"{row.times:.4g}", f"{row.overlapped:.4g}",
                 readable_bytes(round(row.nbytes)), readable_bytes(round(row.sent_bytes)), readable_secs(row.secs))
                for row in self.collectives]
        if len({row.axes for row in self.collectives}) == 1:
            return columns([titles, *rows], range(1, 8))
        axes = [", ".join(row.axes) for row in self.collectives]
        return columns([(*titles, "Over the axes"), *((*row, over) for row, over in zip(rows, axes, strict=True))],
                       range(1, 8))

    def _time_lines(self) -> list[str]:
        time, products = self.roofline, ", ".join(
            f"{readable_number(flops, 'FLOP')} in {dtype}" for dtype, flops in self.product_flops.items()
        ) or "no products"
        rows = [("Compute", readable_secs(time.compute), products),
                ("Memory", readable_secs(time.memory), f"{readable_bytes(round(self.traffic_bytes))} read and written"),
                ("Launches", readable_secs(time.kernels), f"{self.kernels:,.0f} kernels"),
                ("Collectives", readable_secs(time.collectives), f"{readable_secs(time.exposed)} of it not hidden"),
                ("Step", readable_secs(time.step), f"bound by {time.bound}; at most {self.rows_per_sec:,.0f} rows/s"),
                ("Fused steps", str(self.fused_steps), "in one execution" + (
                    f"; {_count(self.unknown_loops, 'loop')} of unknown length" if self.unknown_loops else ""))]
        if self.host_transfers:
            rows.append(("Host transfers", str(self.host_transfers), "instructions"))
        return columns([("Least time of a step", "", ""), *rows], (1,))

    def _alternative_lines(self) -> list[str]:
        if not self.alternatives:
            return []
        return columns(
            [("Alternatives", "Peak", "Fits", "Least step", ""),
             *((each.change, "" if each.peak_bytes is None else readable_bytes(each.peak_bytes),
                "" if each.peak_bytes is None else "yes" if each.fits else "no",
                "" if each.step_secs is None else readable_secs(each.step_secs), each.problem or "")
               for each in self.alternatives)], (1, 3))


def readable_secs(secs: float) -> str:
    """Returns seconds in a suitable unit.

    >>> readable_secs(0.0), readable_secs(3.21e-5), readable_secs(0.0123), readable_secs(2.5)
    ('0 us', '32.1 us', '12.3 ms', '2.5 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if secs >= size:
            return f"{secs / size:.3g} {unit}"
    return f"{secs * 1e6:.3g} us"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
