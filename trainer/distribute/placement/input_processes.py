"""The processes of a mesh, as the data are read by: who they are.

Their messages go without the devices, as threads that read ahead exchange them while the main thread's executions run
over those, in an order that differs between processes.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.cluster.exchange import exchanged
from trainer.data.sharding.processes import Processes


def processes_of(mesh: Mesh, replicas: int) -> Processes:
    """Returns the processes that have a mesh's devices.

    Args:
      mesh: the devices.
      replicas: how many replicas there are on it.
    """
    indices = sorted({device.process_index for device in mesh.devices.flat})
    if len(indices) == 1 or jax.process_index() not in indices:
        return Processes()
    return Processes(indices.index(jax.process_index()), len(indices), max(replicas // len(indices), 1),
                     functools.partial(exchanged, len(indices)), _gathered)


def _gathered(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))
