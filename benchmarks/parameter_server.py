"""Costs of parameter servers: `python benchmarks/parameter_server.py [--engine E] [--rounds N] [part ...]`.

`calls` measures closures per second and parameters that are pulled and pushed, `fit` trains with one to four workers,
each on a core of its own, and `restart` kills a worker. Each writes its section of `RESULTS.md`. See also
`parameter_server_simulations.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import pathlib
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from measuring import Ratio, alternate, table, write_section

import trainer
from trainer import distribute
from trainer.core.train_state import initial_state
from trainer.distribute.parameter_server.served_model import ServedModel
from trainer.optimizers.update_rule import UpdateRule

ENGINES = {"local": "processes of this machine", "ray": "Ray's actors"}


def strategy_of(engine: str, workers: int, servers: int = 1) -> distribute.ParameterServerStrategy:
    """Starts a cluster."""
    address = None if engine == "local" else "local"
    return distribute.ParameterServerStrategy(num_workers=workers, num_ps=servers, address=address)


def section(title: str, engine: str, body: str) -> None:
    """Writes a section, whose title names the engine."""
    write_section(f"Parameter servers on {ENGINES[engine]}: {title}", body)


def middle(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
    """Returns the median with the least and the most."""
    values = [scale * value for value in values]
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


# --- calls ------------------------------------------------------------------------------------------------------------


def nothing() -> None:
    """The scheduled function."""


def closures(engine: str, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Returns seconds of one closure among many, of one alone, and the chief's CPU seconds of one among many."""
    count = 2000 if engine == "local" else 400
    with strategy_of(engine, 2) as strategy:
        coordinator = distribute.ClusterCoordinator(strategy)
        coordinator.fetch([coordinator.schedule(nothing) for _ in range(20)])

        def many(_: int) -> None:
            for _ in range(count):
                coordinator.schedule(nothing)
            coordinator.join()

        def alone(_: int) -> None:
            for _ in range(count // 10):
                coordinator.schedule(nothing).fetch()

        timings = alternate({"many": many, "alone": alone}, rounds)
    return ([seconds / count for seconds in timings["many"].seconds],
            [seconds / (count // 10) for seconds in timings["alone"].seconds],
            [seconds / count for seconds in timings["many"].cpu_seconds])


def round_trip(arrays: list[np.ndarray]) -> Callable[[int], None]:
    """Returns a function that sends arrays through a pair of sockets, received by a thread, which answers a byte."""
    one, other = socket.socketpair()
    buffers = [memoryview(np.empty_like(array)).cast("B") for array in arrays]

    def receive() -> None:
        while True:
            for buffer in buffers:
                done = 0
                while done < len(buffer):
                    done += other.recv_into(buffer[done:])
            other.sendall(b"1")

    threading.Thread(target=receive, daemon=True).start()

    def send(_: int) -> None:
        for array in arrays:
            one.sendall(memoryview(array).cast("B"))
        one.recv(1)

    return send


def transfers(strategy: distribute.ParameterServerStrategy, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds to pull and to push so many bytes in four arrays, and to copy them."""
    rng = np.random.default_rng(0)
    arrays = {str(index): rng.normal(size=megabytes * 250_000 // 4).astype(np.float32) for index in range(4)}
    rule = UpdateRule(trainer.optimizers.get(optax.sgd(1e-3)))
    state = jax.device_get(initial_state(arrays, {}, rule, jnp.uint32(0)))
    served = ServedModel(f"{megabytes} MB", strategy._servers)
    served.load(state)
    client = served.client(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))
    client.pull()
    timings = alternate({
        "pull": lambda number: dataclasses.replace(client).pull(),  # which knows no version
        "push, with the update": lambda number: client.push(None, arrays, None, {}, {}),
        "`np.copy`": lambda number: [np.copy(array) for array in arrays.values()],
        "a pair of sockets": round_trip(list(arrays.values())),
    }, 4 * rounds)
    return {name: timing.seconds for name, timing in timings.items()}


def measure_calls(engine: str, rounds: int) -> None:
    """Measures closures and transfers."""
    many, alone, chief = closures(engine, rounds)
    rows = []
    with strategy_of(engine, 1) as strategy:
        strategy._servers[0].call("ready")
        for megabytes in (1, 30):
            seconds = transfers(strategy, megabytes, rounds)
            rows += [[f"{megabytes} MB", name, middle(taken, 1e3), Ratio.of(taken, seconds["`np.copy`"]),
                      Ratio.of(taken, seconds["a pair of sockets"])] for name, taken in seconds.items()]
    section("calls", engine, f"""
A function that does nothing, on 2 workers: {1 / statistics.median(many):.0f} a second of many that are scheduled at
once, {middle(alone, 1e3)} ms for one that is waited for alone, {middle(chief, 1e6, 0)} us of the chief's CPU time for
one of many. Parameters in four arrays, pulled from and pushed to one server, which updates them by SGD, against copies
of the same bytes: in memory, and to a thread through a pair of sockets. {rounds} rounds in turn,
{4 * rounds} of transfers: `python benchmarks/parameter_server.py --engine {engine} --rounds {rounds} calls`.

{table(["parameters", "", "ms", "to `np.copy`", "to a pair of sockets"], rows)}""")


# --- fit --------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH, BATCH, FIT_STEPS = 1024, 6, 256, 16


class Wide(nn.Module):
    """Much to compute for its parameters: one layer, applied again and again."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(WIDTH)
        for _ in range(DEPTH):
            x = nn.tanh(layer(x))
        return nn.Dense(10)(x)


def pin(cores: set[int]) -> None:
    """Has all threads of this process use these cores only, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def pin_worker(folder: str, cores: list[int]) -> int:
    """Pins the worker that runs this to a core that no other worker has taken; returns the core."""
    for core in cores:
        try:
            os.mkdir(f"{folder}/{core}")
        except FileExistsError:
            continue
        pin({core})
        while len(os.listdir(folder)) < len(cores):  # so that this runs once in each worker
            time.sleep(0.01)
        return core
    raise RuntimeError("more calls than cores")


def model_of(strategy: Any) -> trainer.Model:
    """Returns the model to be trained under a strategy."""
    with strategy.scope():
        model = trainer.Model(Wide(), seed=0)
        model.compile(optax.sgd(1e-3), trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def measure_fit(engine: str, rounds: int) -> None:
    """Measures `fit` with several numbers of workers against one process."""
    every = sorted(os.sched_getaffinity(0))
    rng = np.random.default_rng(0)
    rows_of_epoch = FIT_STEPS * BATCH
    x = rng.normal(size=(rows_of_epoch, WIDTH)).astype(np.float32)
    y = rng.integers(0, 10, rows_of_epoch)

    def epochs(strategy: Any) -> Iterator[None]:
        model = model_of(strategy)
        for number in itertools.count():
            yield
            model.fit(x, y, batch_size=BATCH, initial_epoch=number, epochs=number + 1, verbose=0)

    def epoch(strategy: Any) -> Callable[[int], None]:
        trained = epochs(strategy)
        next(trained)
        return lambda number: next(trained)

    # A process that has one core from its start: a worker, which trains a model of its own.
    alone = strategy_of("local", 1)
    coordinator = distribute.ClusterCoordinator(alone)
    coordinator.schedule(pin, args=({every[0]},)).fetch()
    of_alone = iter(coordinator.create_per_worker_dataset(lambda: epochs(distribute.OneDeviceStrategy())))
    coordinator.schedule(next, args=(of_alone,)).fetch()
    contestants = {
        "one process on one core": lambda number: coordinator.schedule(next, args=(of_alone,)).fetch(),
        f"one process on all {len(every)} cores": epoch(distribute.OneDeviceStrategy())}
    strategies = [alone]
    for workers in [count for count in (1, 2, 4) if count <= len(every)]:
        strategies.append(strategy_of(engine, workers))
        scheduler = distribute.ClusterCoordinator(strategies[-1])
        with tempfile.TemporaryDirectory() as folder:
            cores = every[-workers:]
            scheduler.fetch([scheduler.schedule(pin_worker, args=(folder, cores)) for _ in cores])
        contestants[f"{workers} worker{'s' * (workers > 1)}"] = epoch(strategies[-1])
    timings = alternate(contestants, rounds)
    for strategy in strategies:
        strategy.close()
    seconds = {name: timing.seconds for name, timing in timings.items()}
    on_core, on_all = list(seconds.values())[:2]
    rows = [[name, middle(taken, 1e3 / FIT_STEPS, 0), Ratio.of(on_core, taken), Ratio.of(on_all, taken)]
            for name, taken in seconds.items()]
    section("`fit`", engine, f"""
An epoch of {FIT_STEPS} steps of {BATCH} rows; a dense layer of {WIDTH} that is applied {DEPTH} times, SGD. Each worker
is on one core, while the server and the chief have no core of their own; {rounds} rounds in turn:
`python benchmarks/parameter_server.py --engine {engine} --rounds {rounds} fit`. One process takes the steps one after
the other.

{table(["", "ms/step", "times as fast as on one core", "times as fast as on all"], rows)}""")


# --- restart ----------------------------------------------------------------------------------------------------------


def note_start(path: str) -> None:
    """Notes when it started in a file, and goes on for long the first time."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {time.time()}\n")
    if len(pathlib.Path(path).read_text().splitlines()) == 1:
        time.sleep(600)


def await_workers(coordinator: distribute.ClusterCoordinator) -> None:
    """Waits until all workers have started, also those that replace others."""
    for slot in coordinator._slots:
        while True:
            try:
                slot.handle.call("ready")
                break
            except ConnectionError:
                time.sleep(0.05)


def measure_restart(engine: str, rounds: int) -> None:
    """Measures from the kill of a worker to the next start of the function that it ran."""

    def restarts(workers: int) -> Iterator[float]:
        with strategy_of(engine, workers) as strategy, tempfile.TemporaryDirectory() as folder:
            coordinator = distribute.ClusterCoordinator(strategy)
            for number in range(rounds):
                await_workers(coordinator)
                path = pathlib.Path(folder) / str(number)
                coordinator.schedule(note_start, args=(str(path),))
                while not path.exists() or not path.read_text().endswith("\n"):
                    time.sleep(0.01)
                time.sleep(0.2)
                killed = time.time()
                os.kill(int(path.read_text().split()[0]), signal.SIGKILL)
                coordinator.join()
                yield float(path.read_text().split()[-1]) - killed

    rows = [[workers, middle(list(restarts(workers)), 1, 3)] for workers in (2, 1)]
    section("a worker's loss", engine, f"""
Seconds from `kill -9` of a worker to the next start of the function that it ran: on the other worker, which is idle, or
on the process that replaces the only one. {rounds} times each:
`python benchmarks/parameter_server.py --engine {engine} --rounds {rounds} restart`.

{table(["workers", "s"], rows)}""")


def run_parts(description: str | None, parts: dict[str, Callable[[str, int], None]]) -> None:
    """Measures the parts that the command line names, or all, on the engine and for the rounds that it gives."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[], help="all by default")
    parser.add_argument("--engine", choices=list(ENGINES), default="local")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for part in options.parts or parts:
        parts[part](options.engine, options.rounds)


if __name__ == "__main__":
    run_parts(__doc__, {"calls": measure_calls, "fit": measure_fit, "restart": measure_restart})
