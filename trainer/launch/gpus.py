"""The GPUs of this machine, and the share of each worker.

Owns the detection of GPUs without JAX, and the environment variables for GPUs and their memory.
"""

from __future__ import annotations

import glob
import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from trainer.launch import output

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_PLATFORMS = {"", "cuda", "gpu"}
_IDENTIFIER = re.compile(r"\d+|(GPU|MIG)-\S+")  # CUDA reads a list up to the first invalid entry, such as -1
_GPU_LINE = re.compile(r"GPU (\d+):")
_INSTANCE_LINE = re.compile(r"\s+MIG .*\(UUID: (\S+)\)")
_DRIVER_FOLDERS = "/proc/driver/nvidia/gpus/*"
_LIST_SECS = 30.0  # the first call after a boot loads the driver


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that a process would use, in the form of `CUDA_VISIBLE_DEVICES`.

    These are the GPUs of `CUDA_VISIBLE_DEVICES`, by default all GPUs that `nvidia-smi -L` lists; for GPUs that are
    divided into MIG instances, the instances. The list is empty if `JAX_PLATFORMS` names no GPUs.

    Args:
      environment: the environment of the process.
    """
    if _GPU_PLATFORMS.isdisjoint(environment.get("JAX_PLATFORMS", "").lower().split(",")):
        return []
    chosen = environment.get(VISIBLE)
    if chosen is not None:
        names = (name.strip() for name in chosen.split(","))
        return list(itertools.takewhile(_IDENTIFIER.fullmatch, names))
    return _all_gpus(environment.get("PATH"))


def divide(gpus: Sequence[str], workers: int, per_worker: int | None) -> list[Sequence[str]]:
    """Returns the GPUs of each worker: the same number for each, without overlap.

    Args:
      workers: number of workers.
      per_worker: number of GPUs of each worker; None for equal shares.

    Raises:
      ValueError: if there are too few GPUs.

    >>> divide(["0", "1", "2", "3", "4"], 2, None)
    [['0', '1'], ['2', '3']]
    """
    wanted = per_worker or 1
    if workers * wanted > len(gpus):
        each = "" if per_worker is None else f" with {per_worker} devices each"
        raise ValueError(
            f"There are {len(gpus)} GPUs ({', '.join(gpus)}) for {workers} workers{each}. A GPU serves one worker: ask "
            f"for at most {len(gpus) // wanted} workers, or set JAX_PLATFORMS=cpu, with which workers compute on CPUs.")
    count = per_worker or len(gpus) // workers
    return [gpus[worker * count:(worker + 1) * count] for worker in range(workers)]


def memory_settings(fraction: float | None) -> dict[str, str]:
    """Returns the changes of an environment that limit JAX to a fraction of each GPU's memory.

    Args:
      fraction: the fraction allocated at the start; 0 to allocate on demand; None for no change.

    >>> memory_settings(0)
    {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    """
    if fraction is None:
        return {}
    if fraction == 0:
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # JAX does not start if the older name is set too.
    return {"XLA_CLIENT_MEM_FRACTION": str(fraction), "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}


def _all_gpus(path: str | None) -> list[str]:
    program = shutil.which("nvidia-smi", path=path)
    if program is not None:
        try:
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIST_SECS, check=True)
        except (OSError, subprocess.SubprocessError) as error:  # such as a driver that does not respond
            said = (error.stdout if isinstance(error, subprocess.CalledProcessError) else "") or str(error)
            line = said.strip().partition("\n")[0].rstrip(".")
            output.say(f"`nvidia-smi -L` fails ({line}). Workers get the GPUs that the driver lists in /proc, if any.")
        else:
            lines = listed.stdout.splitlines()
            instances = [found[1] for found in map(_INSTANCE_LINE.match, lines) if found]
            # With instances, CUDA shows a process no whole GPU.
            return instances or [found[1] for found in map(_GPU_LINE.match, lines) if found]
    return [str(index) for index, _ in enumerate(glob.glob(_DRIVER_FOLDERS))]
