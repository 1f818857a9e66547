"""A lower bound of a step's time, from its computation, memory traffic and communication, and the rates of a GPU.

Source: Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures", 2009; for the
bytes that a ring sends, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trainer.distribute.placement.described import Topology
from trainer.distribute.placement.gpu_kinds import NETWORK_BANDWIDTH
from trainer.tools.plan.program_contents import Collective

KERNEL_SECS = 1e-6  # time of an empty kernel
COLLECTIVE_SECS = 12e-6  # time of a collective of few bytes, measured on 8 H100s of a host; longer between hosts


class Roofline(NamedTuple):
    """The minimum time of a step in seconds, with everything at its peak rate.

    Attributes:
      compute: time of the products and convolutions.
      memory: time of the kernels' memory traffic.
      kernels: time of the kernels in sequence, if they were empty.
      collectives: time of all collectives in sequence.
      exposed: time of collectives without overlap: collectives with no work between start and end, and the time by
        which the others exceed the rest of the step.
    """

    compute: float
    memory: float
    kernels: float
    collectives: float
    exposed: float

    @property
    def step(self) -> float:
        """Time of the step: the maximum of computation, memory traffic and launches, plus exposed collectives."""
        return max(self.compute, self.memory, self.kernels) + self.exposed

    @property
    def without_overlap(self) -> float:
        """Time of the step without overlap of collectives."""
        return max(self.compute, self.memory, self.kernels) + self.collectives

    @property
    def bound(self) -> str:
        """The bottleneck of the step: "compute", "memory", "kernels" or "collectives"."""
        times = {"compute": self.compute, "memory": self.memory, "kernels": self.kernels, "collectives": self.exposed}
        return max(times, key=lambda name: times[name])


class SentRow(NamedTuple):
    """The collectives of a kind over a group of devices, in a step.

    Attributes:
      kind: the kind, such as "all-reduce".
      devices: number of devices of a group.
      hosts: number of hosts of a group.
      times: number of runs.
      overlapped: number of runs with kernels between start and end.
      nbytes: bytes of the whole arrays.
      sent_bytes: minimum number of bytes that a device sends.
      secs: minimum time in sequence.
      axes: the mesh axes along which the devices of a group differ.
    """

    kind: str
    devices: int
    hosts: int
    times: float
    overlapped: float
    nbytes: float
    sent_bytes: float
    secs: float
    axes: tuple[str, ...] = ()


def axes_between(group: Sequence[int], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which devices differ, given by their places in the mesh, the last axis fastest.

    >>> axes_between([0, 8], {"replica": 2, "shard": 4, "model": 2})
    ('replica',)
    >>> axes_between([0, 2, 4, 6, 8, 10, 12, 14], {"replica": 2, "shard": 4, "model": 2})
    ('replica', 'shard')
    """
    places = np.unravel_index(list(group), tuple(mesh_shape.values())) if mesh_shape else ()
    return tuple(axis for axis, along in zip(mesh_shape, places, strict=True) if len(set(along.tolist())) > 1)


def bandwidth(group: Sequence[int], topology: Topology) -> float:
    """Returns the bytes per second that each device of a group can send to the next in a ring.

    Inside of a host, it is the bandwidth of the link. Between hosts, all devices of a host in the group send at once,
    each through its own network adapter, and the ring passes each host through a single adapter.

    >>> bandwidth(range(8), Topology.of("2x8xh100")) / 1e9, bandwidth(range(16), Topology.of("2x8xh100")) / 1e9
    (450.0, 400.0)
    >>> bandwidth([0, 8], Topology.of("2x8xh100")) / 1e9
    50.0
    """
    by_host = Counter(device // topology.gpus_per_host for device in group)
    link = topology.gpu.link_bandwidth
    return link if len(by_host) == 1 else min(link, NETWORK_BANDWIDTH * min(by_host.values()))


def sent_rows(
    collectives: Iterable[Collective], topology: Topology, steps: int,
    mesh_shape: Mapping[str, int] = MappingProxyType({}),
) -> tuple[SentRow, ...]:
    """Returns the collectives of a step by kind, size of their groups and mesh axes.

    Args:
      collectives: the collectives of an execution of `steps` steps.
      topology: the GPUs.
      steps: number of steps.
      mesh_shape: sizes of the mesh axes by name; without it, collectives are not told apart by axes.
    """
    rows: dict[Any, SentRow] = {}
    for each in collectives:
        hosts = len({device // topology.gpus_per_host for device in each.group})
        count = each.times / steps
        overlapped = count if each.is_asynchronous and each.kernels_between else 0.0
        sent = each.sent_bytes * count
        row = SentRow(each.kind, len(each.group), hosts, count, overlapped, each.nbytes * count, sent,
                      count * _secs(each, topology), axes_between(each.group, mesh_shape))
        key = *row[:3], row.axes
        before = rows.get(key)
        rows[key] = row if before is None else row._replace(**{
            name: getattr(before, name) + getattr(row, name)
            for name in ("times", "overlapped", "nbytes", "sent_bytes", "secs")})
    return tuple(sorted(rows.values(), key=lambda row: -row.sent_bytes))


def roofline(
    products: Mapping[str, float], traffic_bytes: float, kernels: float, collectives: Iterable[Collective],
    topology: Topology, steps: int,
) -> Roofline:
    """Returns the lower bound of a step.

    Args:
      products: operations of a device by dtype, as in `trainer.core.compile.cost_analysis.Cost`.
      traffic_bytes, kernels: memory traffic in bytes and number of kernels of a step.
      collectives: the collectives of an execution of `steps` steps.
    """
    gpu = topology.gpu
    slowest = min(gpu.peak_flops.values())
    compute = sum(flops / gpu.peak_flops.get(_family(dtype), slowest) for dtype, flops in products.items())
    memory, launches = traffic_bytes / gpu.memory_bandwidth, kernels * KERNEL_SECS
    alone, beside = 0.0, 0.0
    for each in collectives:
        secs = each.times / steps * _secs(each, topology)
        if each.is_asynchronous and each.kernels_between:
            beside += secs
        else:
            alone += secs
    return Roofline(compute, memory, launches, alone + beside,
                    alone + max(0.0, beside - max(compute, memory, launches)))


def _secs(collective: Collective, topology: Topology) -> float:
    """Returns the minimum time of a collective: its latency, and the time to send its bytes."""
    return COLLECTIVE_SECS + collective.sent_bytes / bandwidth(collective.group, topology)


def _family(dtype: str) -> str:
    """Returns the family of a dtype, such as "float8" for "float8_e4m3fn"."""
    return dtype.partition("_")[0].removeprefix("u")
