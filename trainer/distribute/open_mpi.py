"""The cluster that Open MPI's `mpirun`, before its version 5, describes to each process.

The processes meet where JAX, which detects Open MPI too, would let them meet: on the launcher's machine, which is taken
to be that of process 0. Only that address is known. From version 5 on, nothing but MPI itself tells one.
"""

from __future__ import annotations

import os
import re

from trainer.distribute.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.launched_cluster import launched_cluster

LAUNCHER = "OMPI_MCA_orte_hnp_uri"  # such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
_FIRST_IP = re.compile(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]")
_LAUNCHES = 2**12  # what the last bits of a job's number count, within the job
_ADVICE = "Start the processes with `mpirun`, or unset the variables OMPI_* to train in one process."


def in_open_mpi() -> bool:
    """Returns whether this process is one that `mpirun` started, in a version that says where all can meet."""
    major = os.environ.get("OMPI_VERSION", "").partition(".")[0]
    return LAUNCHER in os.environ and not (major.isdecimal() and int(major) >= 5)


def open_mpi_cluster() -> ClusterDescription:
    """Returns the processes that `mpirun` started together with this one.

    They meet on the launcher's machine, unless they are told where (see `launched_cluster`).

    Raises:
      ClusterError: if a variable does not hold what `mpirun` writes into it, or the address is wrong.

    Source: https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables
    """
    uri = os.environ[LAUNCHER]
    job, found = uri.partition(".")[0], _FIRST_IP.search(uri)
    if not (job.isascii() and job.isdecimal()) or found is None:
        raise ClusterError(f"{LAUNCHER} is {uri!r}, which is no job's number and address. {_ADVICE}")
    return launched_cluster(
        called="rank", number_name="OMPI_COMM_WORLD_RANK", count_name="OMPI_COMM_WORLD_SIZE", host_name=LAUNCHER,
        host=found[1] or f"[{found[2]}]", job=int(job) // _LAUNCHES, advice=_ADVICE, job_id=f"Open MPI {uri}")
