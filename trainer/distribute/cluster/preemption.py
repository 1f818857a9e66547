"""The boundary at which the processes of a job save because a process is about to be preempted.

JAX's coordination service finds it after a process has received SIGTERM. No devices are used.
"""

from __future__ import annotations


def reached_preemption_sync_point(boundary: int) -> bool:
    """Returns whether all processes of the job must save at this boundary, because a process has received SIGTERM.

    Args:
      boundary: number of a boundary of batches, which all processes reach; increasing from call to call.
    """
    from jax.experimental import multihost_utils  # imports much of JAX

    return multihost_utils.reached_preemption_sync_point(boundary)
