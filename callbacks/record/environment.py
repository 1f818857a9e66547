"""Environment of a run: versions, devices, the command, and the commit of the script.

Needs no model. Nothing here raises: unknown values are left out, or None.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import jax

DISTRIBUTIONS = ("trainer-jax", "jax", "jaxlib", "flax", "optax", "numpy")
GIT_TIMEOUT_SECS = 2.0


def environment() -> dict[str, Any]:
    """Returns versions, devices, the command, the machine and the commit of the script's folder, as plain data.

    >>> sorted(environment())
    ['command', 'devices', 'git', 'machine', 'versions']
    """
    return {"versions": versions(), "devices": devices(), "command": [sys.executable, *sys.argv],
            "machine": {"name": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
            "git": git_state(script_folder())}


@functools.cache  # read from the disk, and the imported packages stay the same
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> dict[str, Any]:
    """Returns the kind and the number of all devices, the number of local devices, and the number of processes."""
    try:
        kinds = sorted({device.device_kind for device in jax.devices()})
        return {"platform": jax.devices()[0].platform, "kind": ", ".join(kinds), "count": len(jax.devices()),
                "of_this_process": len(jax.local_devices()), "processes": jax.process_count()}
    except RuntimeError:  # there is no backend
        return {}


def peak_memory() -> dict[str, int]:
    """Returns the peak memory of this program on each of its devices in bytes, if the device reports it."""
    peaks = {}
    for device in jax.local_devices():
        try:
            peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        except (RuntimeError, NotImplementedError):
            peak = None
        if peak is not None:
            peaks[f"{device.platform}:{device.id}"] = int(peak)
    return peaks


def script_folder() -> str:
    """Returns the folder of the running script, or the working folder."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(path)) if path else os.getcwd()


@functools.lru_cache
def git_state(folder: str) -> dict[str, Any] | None:
    """Returns the commit of a folder, and whether tracked files have changed since; None outside of Git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"folder": folder, "commit": commit, "is_dirty": None if changes is None else bool(changes)}


def _git(folder: str, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              timeout=GIT_TIMEOUT_SECS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
