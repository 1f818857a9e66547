"""Costs of a checkpoint of a large state: `python benchmarks/checkpoint_costs.py [--rounds N] [--megabytes N]`.

CPU time, time that the training thread waits, and peak memory, each in a fresh process. Orbax alone and a safetensors
file of the same arrays take turns with it. Writes its section of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from measuring import table, write_section

from trainer.engine.saving.arrays import safetensors_file
from trainer.engine.saving.checkpoint import CheckpointWriter, open_checkpoint

LAYERS, WIDTH = 6, 4096
CONTESTANTS = {"this": "checkpoint", "orbax": "Orbax alone", "safetensors": "`save_weights`'s file"}


def state_of(megabytes: int, seed: int) -> dict[str, jax.Array]:
    """Returns the parameters of dense layers and two moments of each."""
    rows, rng = megabytes * 10**6 // 4 // WIDTH // LAYERS // 3, np.random.default_rng(seed)
    names = [f"{part}/{layer}/{kind}" for part in ("params", "mu", "nu") for layer in range(LAYERS)
             for kind in ("kernel", "bias")]
    shapes = {name: (rows, WIDTH) if name.endswith("kernel") else (WIDTH,) for name in names}
    return {name: jnp.array(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def save_and_wait(path: str, state: dict[str, jax.Array]) -> float:
    """Saves a checkpoint; returns for how many seconds the caller could not go on."""
    start = time.perf_counter()
    with CheckpointWriter() as writer:
        writer.save(path, state, {"epoch": 1}, replace=True)
        return time.perf_counter() - start


def save_with_orbax(path: str, state: dict[str, jax.Array]) -> float:
    """Saves with Orbax as it is by default, without checksums and flushes; returns as `save_and_wait`."""
    import orbax.checkpoint as ocp

    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        start = time.perf_counter()
        checkpointer.save(path, args=ocp.args.StandardSave(state), force=True)
        return time.perf_counter() - start


def save_safetensors(path: str, state: dict[str, jax.Array]) -> float:
    """Saves to a safetensors file; returns as `save_and_wait`."""
    start = time.perf_counter()
    safetensors_file.save_arrays(path, state, checksums=True)
    return time.perf_counter() - start


def restore(path: str, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Checks and restores a checkpoint beside the state that is there, as `fit` does."""
    return jax.block_until_ready(open_checkpoint(path).restore(state))


def restore_with_orbax(path: str, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Restores with Orbax, which checks nothing."""
    import orbax.checkpoint as ocp

    targets = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
               for name, leaf in state.items()}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return jax.block_until_ready(checkpointer.restore(path, args=ocp.args.StandardRestore(targets)))


def restore_safetensors(path: str, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reads a safetensors file."""
    with safetensors_file.read_arrays(path) as arrays:
        return jax.block_until_ready({name: jnp.asarray(arrays[name]) for name in state})


SAVES = {"this": save_and_wait, "orbax": save_with_orbax, "safetensors": save_safetensors}
RESTORES = {"this": restore, "orbax": restore_with_orbax, "safetensors": restore_safetensors}


def memory(field: str) -> int:
    """Returns a figure of this process's memory in bytes: VmRSS is the present use, VmHWM the peak."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def measure(act: Callable[[str, Any], Any], folder: str, name: str, megabytes: int) -> None:
    """Prints the costs of one save or restore in this process, per byte of the state, as JSON."""
    path, small = os.path.join(folder, name), {"x": jnp.zeros(3)}
    SAVES[name](f"{path}_small", small)  # imports, and starts threads
    RESTORES[name](f"{path}_small", small)
    gc.collect()
    before = memory("VmRSS")
    state = state_of(megabytes, 0)
    gc.collect()
    size = sum(leaf.nbytes for leaf in state.values())
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    cpu, start = time.process_time(), time.perf_counter()
    result = act(path, state)
    blocked = result if isinstance(result, float) else time.perf_counter() - start
    print(json.dumps({"cpu": 1e9 * (time.process_time() - cpu) / size, "blocked": 1e9 * blocked / size,
                      "seconds": 1e9 * (time.perf_counter() - start) / size,
                      "peak": (memory("VmHWM") - before) / size}))


def main() -> None:
    """Measures, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--one", nargs=3, metavar=("ACTION", "NAME", "FOLDER"), help="for the processes of a round")
    options = parser.parse_args()
    if options.one:
        action, name, folder = options.one
        measure((SAVES if action == "save" else RESTORES)[name], folder, name, options.megabytes)
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name in CONTESTANTS:
                for action in ("save", "restore"):
                    command = [sys.executable, __file__, "--megabytes", str(options.megabytes), "--one", action, name,
                               folder]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    found.setdefault((action, name), []).append(json.loads(done.stdout.splitlines()[-1]))
    rows = [[action, CONTESTANTS[name], *(_text([each[key] for each in rounds])
                                          for key in ("cpu", "blocked", "seconds", "peak"))]
            for (action, name), rounds in found.items()]
    write_section("What a checkpoint of a large state costs", f"""
{options.megabytes} MB of parameters and adam's moments, random numbers, each save and restore in a fresh process, in
turn: `python benchmarks/checkpoint_costs.py`. Medians of {options.rounds} rounds, with the least and the most, per GB
of the state. Blocked is what the caller waits. Peak is the most memory above that of a process with everything
imported, over the state, which is there itself: 1 would be no more. On CPUs a save copies the state, and a restore
makes another one. Orbax is as it is by default: without checksums and flushes.

{table(("", "", "CPU, s/GB", "blocked, s/GB", "whole, s/GB", "peak / state"), rows)}""")


def _text(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
