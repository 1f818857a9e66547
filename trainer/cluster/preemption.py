"""The boundary at which the processes of a job save because one of them is about to be preempted.

JAX's coordination service finds it, once a process has received SIGTERM. No devices are used.
"""

from __future__ import annotations


def reached_preemption_sync_point(boundary: int) -> bool:
    """Returns whether all processes of the job are to save at this boundary, as one of them has received SIGTERM.

    Args:
      boundary: the number of a boundary of batches, which all processes reach; greater than that of the last call.
    """
    from jax.experimental import multihost_utils  # imports much of JAX

    return multihost_utils.reached_preemption_sync_point(boundary)
