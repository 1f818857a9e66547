"""The cluster in a launcher's environment variables, of which only process 0's address is known.

Owns the meeting address of such processes, which equals JAX's, if JAX reads the same variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError

_NUM_PORTS = 2**12  # the last ports, from which JAX selects a port by the job's number


def launched_cluster(
    *, called: str, number_name: str, count_name: str, local_name: str, launcher: Callable[[], tuple[str, int, str]],
    job_id: str, advice: str,
) -> ClusterDescription:
    """Returns the processes that were launched together with this process.

    They meet at JAX_COORDINATOR_ADDRESS; or else on the machine that `launcher` names, at the port JAX_COORDINATOR_PORT
    or a port derived from the job's number.

    Args:
      called: the launcher's term for a process, such as "task".
      number_name: variable with this process's number.
      count_name: variable with the number of processes.
      local_name: variable with this process's number on its machine.
      launcher: returns process 0's host, in the form of an address, the job's number, and the variable of both.
      job_id: identifier that distinguishes this job from others.
      advice: advice for a variable with an unexpected value.

    Raises:
      ClusterError: if a variable has an unexpected value, or the address is wrong.
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
    """Returns the value of an environment variable.

    Raises:
      ClusterError: if the value is not an integer; the message includes `advice`.
    """
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(f"{name} is {text!r}, which is no whole number. {advice}")
    return int(text)
