"""JAX's devices on this machine, its memory, and the folder of compiled programs."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator
from typing import Any

import jax

from trainer.core.ambient.jax_options import jax_config
from trainer.core.units import readable_bytes
from trainer.tools.command_line.findings import Finding

_GPU_FILES = "/dev/nvidia[0-9]*"
_SHARED_MEMORY = "/dev/shm"  # NCCL sends through it between the GPUs of a machine
_MIN_SHARED_BYTES = 2**26  # the default in containers, which NCCL exhausts
_MIN_FREE_SHARE = 0.05


def devices() -> Iterator[Finding]:
    """Yields each device of this process, after it has computed a small product."""
    # Otherwise the first use of a GPU would allocate three quarters of it, which fails alongside a training.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        found = jax.local_devices()
    except Exception as error:
        yield Finding("devices", "JAX", "problem", f"does not start: {type(error).__name__}: {_first_line(error)}")
        return
    for device in found:
        yield _computes(device)
    files = glob.glob(_GPU_FILES)
    if files and all(device.platform == "cpu" for device in found):
        chosen = os.environ.get("JAX_PLATFORMS", "")
        yield Finding("devices", "GPUs", "note", f"{len(files)} here, which JAX_PLATFORMS={chosen} leaves out") if (
            chosen and not {"cuda", "gpu"} & set(chosen.split(","))) else Finding(
            "devices", "GPUs", "problem", f"{len(files)} here, but JAX computes on the CPU. Install JAX for them: pip "
            "install 'trainer-jax[cuda12]' (or [cuda13])")


def memory() -> Iterator[Finding]:
    """Yields the memory of the machine, of its devices and of the folder of shared memory."""
    total, free = _host_memory()
    yield Finding("memory", "host", "warning" if free < _MIN_FREE_SHARE * total else "ok",
                  f"{readable_bytes(free)} of {readable_bytes(total)} free")
    try:
        accelerators = [device for device in jax.local_devices() if device.platform != "cpu"]
    except Exception:  # reported by `devices`
        accelerators = []
    for device in accelerators:
        stats: dict[str, Any] = device.memory_stats() or {}
        if "bytes_limit" in stats:
            yield Finding("memory", _name(device), "ok", f"JAX may take {readable_bytes(stats['bytes_limit'])}; "
                          f"this process has {readable_bytes(stats.get('bytes_in_use', 0))}")
    if len(accelerators) > 1 and os.path.isdir(_SHARED_MEMORY):
        size = shutil.disk_usage(_SHARED_MEMORY).total
        small = size <= _MIN_SHARED_BYTES
        yield Finding("memory", _SHARED_MEMORY, "problem" if small else "ok", readable_bytes(size) + (
            ", too little for NCCL. Start the container with --shm-size=1g" if small else ""))


def compile_cache() -> Iterator[Finding]:
    """Yields the location, the number and the write permissions of compiled programs."""
    chosen = jax_config.jax_compilation_cache_dir
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "trainer-jax"
    if chosen and "://" in chosen:
        yield Finding("compile cache", chosen, "note", "not on this machine: not looked at")
        return
    path = pathlib.Path(chosen) if chosen else default
    why = "by JAX_COMPILATION_CACHE_DIR" if chosen else "of `trainer.enable_compilation_cache()`"
    if not path.is_dir():
        yield Finding("compile cache", str(path), "note", f"{why}; it is made when it is first used. "
                      "A script that calls `trainer.enable_compilation_cache()` starts faster the second time")
        return
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    size = sum(entry.stat().st_size for entry in files)
    about = f"{why}: {len(files)} files, {readable_bytes(size)}"
    info = path.stat()
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding("compile cache", str(path), "problem", f"{about}. It cannot be written to: every program "
                      "compiles again. Give another folder, or change its owner")
    elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or info.st_uid not in (os.getuid(), 0):
        yield Finding("compile cache", str(path), "warning", f"{about}. Other users may write there, and programs from "
                      f"it run as they are: chmod 700 {path}")
    else:
        yield Finding("compile cache", str(path), "ok", about)


def _computes(device: jax.Device) -> Finding:
    import numpy as np

    name, kind = _name(device), f"{device.device_kind}"
    try:
        ones = jax.device_put(np.ones((8, 8), np.float32), device)
        right = bool((jax.device_get(ones @ ones) == 8).all())
    except Exception as error:
        return Finding("devices", name, "problem",
                       f"{kind}, which fails to compute: {type(error).__name__}: {_first_line(error)}")
    return Finding("devices", name, "ok" if right else "problem",
                   f"{kind}, computes" if right else f"{kind}, computes wrong numbers: a product of ones is not 8")


def _host_memory() -> tuple[int, int]:
    """Returns the total memory in bytes, and the memory available to programs."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # then without memory that the system would free for programs
        pass
    return total, free


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
