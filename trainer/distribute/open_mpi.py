"""The cluster that Open MPI's `mpirun`, before its version 5, describes to each process.

The processes meet where JAX, which detects Open MPI too, would let them meet: on the launcher's machine, which is taken
to be that of process 0. Only that address is known. From version 5 on, nothing but MPI itself tells one.
"""

from __future__ import annotations

import os
import re

from trainer.distribute.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.slurm import whole_number

LAUNCHER = "OMPI_MCA_orte_hnp_uri"  # such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
_FIRST_IP = re.compile(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]")
_NUM_PORTS = 2**12  # the last ones, of which JAX takes one by the job's number
_ADVICE = "Start the processes with `mpirun`, or unset the variables OMPI_* to train in one process."


def in_open_mpi() -> bool:
    """Returns whether this process is one that `mpirun` started, in a version that says where all can meet."""
    major = os.environ.get("OMPI_VERSION", "").partition(".")[0]
    return LAUNCHER in os.environ and not (major.isdecimal() and int(major) >= 5)


def open_mpi_cluster() -> ClusterDescription:
    """Returns the processes that `mpirun` started together with this one.

    They meet at JAX_COORDINATOR_ADDRESS; or else on the launcher's machine, at the port JAX_COORDINATOR_PORT or one
    that follows from the job's number.

    Raises:
      ClusterError: if a variable does not hold what `mpirun` writes into it, or the address is wrong.

    Source: https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables
    """
    number, count = (whole_number(f"OMPI_COMM_WORLD_{name}", _ADVICE) for name in ("RANK", "SIZE"))
    if not number < count:
        raise ClusterError(f"OMPI_COMM_WORLD_RANK is {number}, but OMPI_COMM_WORLD_SIZE is {count}. {_ADVICE}")
    uri = os.environ[LAUNCHER]
    job, found = uri.partition(".")[0], _FIRST_IP.search(uri)
    if not (job.isascii() and job.isdecimal()) or found is None:
        raise ClusterError(f"{LAUNCHER} is {uri!r}, which is no job's number and address. {_ADVICE}")
    address, where = os.environ.get("JAX_COORDINATOR_ADDRESS"), "JAX_COORDINATOR_ADDRESS"
    if not address:
        # Of a job's number the last bits count the launches within it.
        port = os.environ.get("JAX_COORDINATOR_PORT") or str(2**16 - _NUM_PORTS + int(job) // 2**12 % _NUM_PORTS)
        address = f"{found[1] or f'[{found[2]}]'}:{port}"
        where = f"JAX_COORDINATOR_PORT, {LAUNCHER}"
    try:
        return ClusterDescription(
            (address, *[""] * (count - 1)), number, names=tuple(f"rank {index}" for index in range(count)),
            source=f"environment ({where})", job_id=f"Open MPI {uri}")
    except ClusterError as error:
        raise ClusterError(f"Rank 0 has a wrong address by {where}: {error}") from None
