"""Processes of a mesh that read the data.

Their messages do not use the devices: threads that read ahead exchange them while executions of the main thread use the
devices, in an order that differs between processes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.data.sharding.processes import Processes
from trainer.distribute.cluster import ProcessGroup
from trainer.distribute.placement.described import is_described
from trainer.distribute.placement.placement import to_host

_PROCESS_AXIS, _DEVICE_AXIS = "process", "device"


def group_of(mesh: Mesh) -> ProcessGroup:
    """Returns the processes that have a mesh's devices; only this process if they are described or not its own."""
    if is_described(mesh.devices.flat[0]):
        return ProcessGroup.of([jax.process_index()])
    members = sorted({device.process_index for device in mesh.devices.flat})
    return ProcessGroup.of(members if jax.process_index() in members else [jax.process_index()])


def processes_of(mesh: Mesh, replicas: int) -> Processes:
    """Returns the processes that have the devices of a mesh with this number of replicas."""
    group = group_of(mesh)
    if group.count == 1:
        return Processes()
    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    return Processes(group.index, group.count, max(replicas // group.count, 1), group,
                     functools.partial(_gathered, devices, group.count))


def _gathered(devices: Sequence[jax.Device], count: int, array: np.ndarray) -> np.ndarray:
    mesh = Mesh(np.array(devices).reshape(count, -1), (_PROCESS_AXIS, _DEVICE_AXIS))
    by_process = NamedSharding(mesh, PartitionSpec(_PROCESS_AXIS))
    return to_host(jax.make_array_from_callback((count, *array.shape), by_process, lambda index: array[None]))
