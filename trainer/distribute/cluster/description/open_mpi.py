"""The cluster that Open MPI's `mpirun` describes to each process.

The processes meet on the launcher's machine, which counts as process 0's machine, as in JAX for versions before 5. For
later versions JAX queries MPI itself, which waits without a limit for all processes, and needs a package.
"""

from __future__ import annotations

import os
import re

from trainer.distribute.cluster.description.cluster_description import ClusterDescription, ClusterError
from trainer.distribute.cluster.description.launched_cluster import launched_cluster

_LAUNCHER = "OMPI_MCA_orte_hnp_uri"  # such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911; before version 5
_COUNT, _NUMBER, _LOCAL = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_COUNT = "OMPI_COMM_WORLD_LOCAL_SIZE"
_NAMESPACE = "PMIX_NAMESPACE"  # such as prterun-node1-2781@1: the launcher's machine and process; from version 5 on
_IN_URI = re.compile(r"(\d+)\..*?(?:tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]])", re.ASCII)
_IN_NAMESPACE = re.compile(r"prte(?:run)?-(.+)-(\d+)@(\d+)", re.ASCII)
_LAUNCHES = 2**12  # the last bits of a job's number count launches within the job
_ADVICE = "Start the processes with `mpirun`, or unset the variables OMPI_* to train in one process."
_SAY_WHERE = "Set JAX_COORDINATOR_ADDRESS to rank 0's host and a free port of it, for all ranks."


def in_open_mpi() -> bool:
    """Returns whether `mpirun` started this process."""
    return _LAUNCHER in os.environ or all(name in os.environ for name in (_COUNT, _NUMBER, _LOCAL))


def open_mpi_cluster() -> ClusterDescription:
    """Returns the processes that `mpirun` started together with this process.

    They meet on the launcher's machine, unless the environment has an address (see `launched_cluster`), or all are on
    one machine.

    Raises:
      ClusterError: if a variable of `mpirun` has an unexpected value, or the address is wrong.

    Source: https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables
    """
    return launched_cluster(
        called="rank", number_name=_NUMBER, count_name=_COUNT, local_name=_LOCAL, launcher=_launcher, advice=_ADVICE,
        job_id=f"Open MPI {os.environ.get(_LAUNCHER) or os.environ.get(_NAMESPACE, '')}")


def _launcher() -> tuple[str, int, str]:
    """Returns the launcher's machine in the form of an address, the job's number, and the variable of both."""
    if _LAUNCHER in os.environ:
        found = _IN_URI.match(os.environ[_LAUNCHER])
        if found is None:
            raise ClusterError(f"{_LAUNCHER} is {os.environ[_LAUNCHER]!r}, which is no job's number and address. "
                               f"{_ADVICE}")
        return found[2] or f"[{found[3]}]", int(found[1]) // _LAUNCHES, _LAUNCHER
    namespace, number = os.environ.get(_NAMESPACE, ""), os.environ[_NUMBER]
    found = _IN_NAMESPACE.fullmatch(namespace)
    job = 0 if found is None else int(found[2]) + int(found[3])  # of one launcher, too, there may be several at a time
    if os.environ.get(_LOCAL_COUNT) == os.environ[_COUNT]:
        return "127.0.0.1", job, _LOCAL_COUNT
    if found is None:
        raise ClusterError(f"{_NAMESPACE} is {namespace!r}, which does not say on which machine `mpirun` was called. "
                           f"{_SAY_WHERE}")
    own = os.environ.get("PMIX_HOSTNAME", found[1])
    if number == "0" and own != found[1]:
        raise ClusterError(f"Rank 0 runs on {own!r}, but `mpirun` was called on {found[1]!r}. {_SAY_WHERE}")
    return found[1], job, _NAMESPACE
