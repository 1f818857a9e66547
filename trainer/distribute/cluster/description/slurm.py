"""The cluster that SLURM's `srun` describes to each task of a step.

The tasks meet at the same address as in JAX, which detects SLURM too. Only process 0's address is known: SLURM does not
report the machines of the other tasks.
"""

from __future__ import annotations

import os

from trainer.distribute.cluster.description.cluster_description import ClusterDescription
from trainer.distribute.cluster.description.launched_cluster import launched_cluster, whole_number

_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_ADVICE = "Start the tasks with `srun`, or unset the variables SLURM_* to train in one process."


def in_slurm() -> bool:
    """Returns whether this process is a task that `srun` started."""
    return all(name in os.environ for name in _VARIABLES)


def slurm_cluster() -> ClusterDescription:
    """Returns the tasks of this process's step.

    They meet on the step's first machine, unless the environment has an address (see `launched_cluster`).

    Raises:
      ClusterError: if a variable of `srun` has an unexpected value, or the address is wrong.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    # SLURM_NTASKS is the job's number if a step has the shell's environment, as in an interactive step of `salloc`.
    count_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    job = whole_number("SLURM_JOB_ID", _ADVICE)
    return launched_cluster(
        called="task", number_name="SLURM_PROCID", count_name=count_name, local_name="SLURM_LOCALID", advice=_ADVICE,
        launcher=lambda: (_first_host(os.environ["SLURM_STEP_NODELIST"]), job, "SLURM_STEP_NODELIST"),
        job_id=f"SLURM {job}.{os.environ.get('SLURM_STEP_ID', '0')}, restart "
               f"{os.environ.get('SLURM_RESTART_COUNT', '0')}")


def _first_host(nodes: str) -> str:
    """Returns the first host of a SLURM host list.

    >>> [_first_host(nodes) for nodes in ("gpu7", "gpu7,cpu1", "gpu[07-09,12],cpu1", "rack2-gpu[3,5]")]
    ['gpu7', 'gpu7', 'gpu07', 'rack2-gpu3']
    """
    prefix, bracket, numbers = nodes.partition(",")[0].partition("[")
    return prefix + numbers.replace("]", "-").partition("-")[0] if bracket else prefix
