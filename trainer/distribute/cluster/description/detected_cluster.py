"""The cluster that JAX detects by itself: on Kubernetes and TPUs.

Only the API of Kubernetes or a TPU's metadata know a process's place there. JAX queries them, and has no public
function that returns the result before it starts.
"""

from __future__ import annotations

import inspect
import math
import os

from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError

_ALONE = ('To train in one process, set TF_CONFIG=\'{"cluster": {"worker": ["localhost:2222"]}, '
          '"task": {"type": "worker", "index": 0}}\'.')


def detected_cluster(kind: str, timeout_secs: float) -> ClusterDescription | None:
    """Returns the cluster that JAX would start in; None if it finds none.

    Only process 0's address is known.

    Args:
      kind: return value of `detect_cluster`.
      timeout_secs: seconds to wait until the host name of process 0 is known.

    Raises:
      ClusterError: if JAX cannot find this process's place, for example without the right to read pods.
      ImportError: if this version of JAX has no such query.
    """
    from jax._src.clusters import ClusterEnv

    known = os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, math.ceil(timeout_secs)
    try:
        detect = ClusterEnv.auto_detect_unset_distributed_params
        inspect.signature(detect).bind(*known)
    except (AttributeError, TypeError) as error:
        raise ImportError(f"JAX's detection of clusters has changed: {error}") from error
    try:
        address, count, number, local_ids = detect(*known)
        if address is None or count is None or number is None:
            return None
        return ClusterDescription((address, *[""] * (count - 1)), number, source=f"JAX's detection ({kind})",
                                  local_id=local_ids[0] if local_ids else None)
    except Exception as error:
        raise ClusterError(f"There are signs of a cluster ({kind}), but JAX does not find this process's place in it. "
                           f"{_ALONE} JAX says: {error}") from error
