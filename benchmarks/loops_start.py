"""Figures of a fresh process. Run as a script it is that process: `python loops_start.py FIGURE WHO WORKLOAD`.

At the top it imports no more than the standard library: a child's peak memory starts from its parent's.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable


def fresh(workload, figure: str, who: str) -> Callable[[int], dict[str, float]]:
    """Returns a function that takes a figure in a process of its own, once however many epochs are asked for."""
    if figure == "device_memory" and os.environ["BENCHMARK_PLATFORM"] == "cpu":
        from cases import Unavailable

        raise Unavailable("simulated devices do not count their memory")
    command = [sys.executable, __file__, figure, who, json.dumps(dataclasses.asdict(workload))]
    # The trainer's sources are compiled in the warm-up, as an installed package's are when it is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run(epochs):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        return {"steps": 1, "figure": float(done.stdout.splitlines()[-1])}

    return run


def _import_trainer() -> None:
    import trainer

    for name in sorted(set(trainer.__all__) - {"testing"}):  # each is imported when it is first used
        getattr(trainer, name)


def _import_time(who: str, workload) -> float:
    start = time.perf_counter()
    if who == "trainer":
        _import_trainer()
    else:
        import flax  # noqa: F401
        import jax  # noqa: F401
        import optax  # noqa: F401
    return time.perf_counter() - start


def _loops(who: str):
    # Only one is imported: the process by hand is without the trainer.
    if who != "by_hand":
        _import_trainer()
    return importlib.import_module("loops_hand" if who == "by_hand" else "loops_trainer")


def _train(who: str, workload) -> None:
    options = {"data_on_device": False} if who == "streamed" else {}
    _loops(who).fit(workload, **options)(2)  # data that are read once would not be placed on the device


def _first_step(who: str, workload) -> float:
    import jax

    loops = _loops(who)
    x, y = (array[:workload.batch_size] for array in workload.data())
    jax.devices()
    start = time.perf_counter()
    if who == "trainer":
        loops.new_model(workload).fit(x, y, batch_size=workload.batch_size, verbose=0)
    else:
        step, state = loops.new_step(workload, x)
        jax.block_until_ready(jax.jit(step, donate_argnums=0)(state, x, y))
    return time.perf_counter() - start


def _host_memory(who: str, workload) -> float:
    _train(who, workload)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _device_memory(who: str, workload) -> float:
    import jax

    _train(who, workload)
    return max(device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices()) / 1e6


if __name__ == "__main__":
    name, contestant, described = sys.argv[1:]
    if name == "import_time":
        print(_import_time(contestant, None))  # before anything else is imported
    else:
        from cases import Workload

        measure = {"first_step": _first_step, "host_memory": _host_memory, "device_memory": _device_memory}[name]
        print(measure(contestant, Workload(**json.loads(described))))
