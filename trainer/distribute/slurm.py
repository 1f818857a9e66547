"""The cluster that SLURM's `srun` describes to each task of a step.

The tasks meet where JAX, which detects SLURM too, would let them meet. Only process 0's address is known: SLURM does
not tell a task on which machine each of the others runs.
"""

from __future__ import annotations

import os

from trainer.distribute.cluster_description import ClusterDescription, ClusterError

_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_NUM_PORTS = 2**12  # the last ones, of which JAX takes one by the job's number
_ADVICE = "Start the tasks with `srun`, or unset the variables SLURM_* to train in one process."


def in_slurm() -> bool:
    """Returns whether this process is a task that `srun` started."""
    return all(name in os.environ for name in _VARIABLES)


def slurm_cluster() -> ClusterDescription:
    """Returns the tasks of the step that this process is a task of.

    They meet at JAX_COORDINATOR_ADDRESS; or else at the step's first machine, and the port JAX_COORDINATOR_PORT or one
    that follows from the job's number.

    Raises:
      ClusterError: if a variable does not hold what `srun` writes into it, or the address is wrong.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    # SLURM_NTASKS is the job's number where a step has the shell's environment, as an interactive one of `salloc`.
    count_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    job, count, number = (whole_number(name, _ADVICE) for name in ("SLURM_JOB_ID", count_name, "SLURM_PROCID"))
    if not number < count:
        raise ClusterError(f"SLURM_PROCID is {number}, but {count_name} is {count}. {_ADVICE}")
    address, where = os.environ.get("JAX_COORDINATOR_ADDRESS"), "JAX_COORDINATOR_ADDRESS"
    if not address:
        port = os.environ.get("JAX_COORDINATOR_PORT") or str(2**16 - _NUM_PORTS + job % _NUM_PORTS)
        address = f"{_first_host(os.environ['SLURM_STEP_NODELIST'])}:{port}"
        where = "JAX_COORDINATOR_PORT, SLURM_STEP_NODELIST"
    try:
        return ClusterDescription(
            (address, *[""] * (count - 1)), number, names=tuple(f"task {index}" for index in range(count)),
            source=f"environment ({where})",
            job_id=f"SLURM {job}.{os.environ.get('SLURM_STEP_ID', '0')}, restart "
                   f"{os.environ.get('SLURM_RESTART_COUNT', '0')}")
    except ClusterError as error:
        raise ClusterError(f"Task 0 has a wrong address by {where}: {error}") from None


def whole_number(name: str, advice: str) -> int:
    """Returns what an environment variable holds.

    Raises:
      ClusterError: if that is not a whole number; `advice` says what to do then.
    """
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(f"{name} is {text!r}, which is no whole number. {advice}")
    return int(text)


def _first_host(nodes: str) -> str:
    """Returns the first host of a list as SLURM writes it.

    >>> [_first_host(nodes) for nodes in ("gpu7", "gpu7,cpu1", "gpu[07-09,12],cpu1", "rack2-gpu[3,5]")]
    ['gpu7', 'gpu7', 'gpu07', 'rack2-gpu3']
    """
    prefix, bracket, numbers = nodes.partition(",")[0].partition("[")
    return prefix + numbers.replace("]", "-").partition("-")[0] if bracket else prefix
