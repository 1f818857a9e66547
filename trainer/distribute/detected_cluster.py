"""The cluster that JAX finds by itself: on Kubernetes and TPUs.

What a process's place is there, only the API of Kubernetes or a TPU's metadata tell. JAX asks them, and has no public
way to say what it has learned before it starts.
"""

from __future__ import annotations

import math
import os

from trainer.distribute.cluster_description import ClusterDescription, ClusterError


def detected_cluster(timeout_secs: float) -> ClusterDescription | None:
    """Returns the cluster that JAX would start in; None if this version of JAX cannot be asked, or finds none.

    Only process 0's address is known.

    Args:
      timeout_secs: how long to wait for the name of process 0's machine to be known.

    Raises:
      ClusterError: if process 0's address is wrong.
      Exception: whatever JAX raises where it cannot find this process's place, such as without the right to read pods.
    """
    try:
        from jax._src.clusters import ClusterEnv

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        return None
    address, count, number, _ = detect(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, math.ceil(timeout_secs))
    if address is None or count is None or number is None:
        return None
    try:
        return ClusterDescription((address, *[""] * (count - 1)), number, source="JAX's detection")
    except ClusterError as error:
        raise ClusterError(f"JAX finds a wrong address of process 0: {error}") from None
