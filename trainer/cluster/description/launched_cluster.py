"""The cluster that a launcher's environment variables describe, of which only process 0's address is known.

Owns where such processes meet: where JAX, if it reads the same variables, would let them meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from trainer.cluster.description.cluster_description import ClusterDescription, ClusterError

_NUM_PORTS = 2**12  # the last ones, of which JAX takes one by the job's number


def launched_cluster(
    *, called: str, number_name: str, count_name: str, local_name: str, launcher: Callable[[], tuple[str, int, str]],
    job_id: str, advice: str,
) -> ClusterDescription:
    """Returns the processes that were launched together with this process.

    They meet at JAX_COORDINATOR_ADDRESS; or else on the machine that `launcher` names, at the port JAX_COORDINATOR_PORT
    or a port that follows from the job's number.

    Args:
      called: what the launcher calls a process, such as "task".
      number_name: the variable with this process's number.
      count_name: the variable that says how many there are.
      local_name: the variable with its number among those on the same machine.
      launcher: returns process 0's host, as it stands in an address, the job's number, and the variable they are from.
      job_id: distinguishes this job from others.
      advice: what to do if a variable does not hold what the launcher writes into it.

    Raises:
      ClusterError: if that is so, or the address is wrong.
    """
    count, number = (whole_number(name, advice) for name in (count_name, number_name))
    if not number < count:
        raise ClusterError(f"{number_name} is {number}, but {count_name} is {count}. {advice}")
    if count == 1:
        return ClusterDescription(("127.0.0.1:1",), 0, source="environment", job_id=job_id)  # it meets no other
    local_id = whole_number(local_name, advice)
    address, where = os.environ.get("JAX_COORDINATOR_ADDRESS"), "JAX_COORDINATOR_ADDRESS"
    if not address:
        host, job, host_name = launcher()
        port = os.environ.get("JAX_COORDINATOR_PORT") or str(2**16 - _NUM_PORTS + job % _NUM_PORTS)
        address, where = f"{host}:{port}", f"JAX_COORDINATOR_PORT, {host_name}"
    try:
        return ClusterDescription(
            (address, *[""] * (count - 1)), number, names=tuple(f"{called} {index}" for index in range(count)),
            source=f"environment ({where})", job_id=job_id, local_id=local_id)
    except ClusterError as error:
        raise ClusterError(f"{called.capitalize()} 0 has a wrong address by {where}: {error}") from None


def whole_number(name: str, advice: str) -> int:
    """Returns what an environment variable holds.

    Raises:
      ClusterError: if that is not a whole number; `advice` says what to do then.
    """
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(f"{name} is {text!r}, which is no whole number. {advice}")
    return int(text)
