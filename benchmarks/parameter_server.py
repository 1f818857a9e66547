"""What parameter servers cost: `python benchmarks/parameter_server.py [--engine E] [--rounds N] [part ...]`.

`calls` measures closures per second and parameters that are pulled and pushed, `fit` trains with one to four workers,
each on a core of its own, `restart` kills a worker, `convergence` trains with exact staleness in this process, and
`scale` computes from measured costs what a large cluster would reach. Each writes its section of `RESULTS.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
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
from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
from trainer.distribute.parameter_server.served_model import ServedModel, on_each
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
    """What is scheduled."""


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
        "push, with the update": lambda number: client.push(None, arrays, None, {}),
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
    """Pins the worker that runs this to a core that no other one has taken; returns the core."""
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


# --- convergence ------------------------------------------------------------------------------------------------------

STALENESS = (0, 1, 4, 16)
LEAST_STEPS, DIGITS_STEPS = 480, 2300
RATES = [2.0**power for power in range(-12, 7)]


def least_squares() -> tuple[Any, Any, int, Callable[[Any], Any]]:
    """Returns initial parameters, a loss, the number of rows, and whether parameters are good enough."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 20)).astype(np.float32)
    x, y = jnp.asarray(x), jnp.asarray(x @ rng.normal(size=20).astype(np.float32))

    def loss(params: Any, rows: Any) -> Any:
        return ((x[rows] @ params - y[rows]) ** 2).mean()

    return jnp.zeros(20), loss, len(x), lambda params: loss(params, slice(None)) < 1e-3 * (y**2).mean()


def digits() -> tuple[Any, Any, int, Callable[[Any], Any]]:
    """Returns the same for scikit-learn's digits: a hidden layer, and 95% of 297 other rows."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = jnp.asarray(x[order] / 16, jnp.float32), jnp.asarray(y[order])
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (64, 32)) / 8, "b": jnp.zeros(32),
              "v": jax.random.normal(keys[1], (32, 10)) / 32**0.5, "c": jnp.zeros(10)}

    def logits(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"] + params["c"]

    def loss(params: Any, rows: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x[rows]), y[rows]).mean()

    return params, loss, 1500, lambda params: (logits(params, x[1500:]).argmax(-1) == y[1500:]).mean() >= 0.95


def delayed(task: Callable[[], Any], momentum: float, scales: bool, staleness: int, steps: int) -> Callable[..., Any]:
    """Returns a function of rates and a seed that trains with each, every gradient that stale; whether it is good."""
    initial, loss, count, is_good = task()
    optimizer = optax.sgd(1.0, momentum=momentum or None)

    def run(rate: Any, rows: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            past, opt_state = carry  # the newest parameters last
            grads = jax.grad(loss)(jax.tree.map(lambda leaf: leaf[0], past), rows)
            grads = jax.tree.map(lambda leaf: leaf / (1 + staleness if scales else 1), grads)
            updates, opt_state = optimizer.update(grads, opt_state)
            past = jax.tree.map(
                lambda leaf, update: jnp.concatenate([leaf[1:], leaf[-1:] + rate * update]), past, updates)
            return (past, opt_state), None

        # As a worker that has pulled before the first updates: their gradients are less stale in `fit`.
        past = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (staleness + 1, *leaf.shape)), initial)
        (past, _), _ = jax.lax.scan(step, (past, optimizer.init(initial)), rows)
        return is_good(jax.tree.map(lambda leaf: leaf[-1], past))

    compiled = jax.jit(jax.vmap(run, in_axes=(0, None)))

    def good(rates: list[float], seed: int) -> Any:
        rng = np.random.default_rng(seed)
        epochs = [rng.permutation(count)[:count // 32 * 32].reshape(-1, 32) for _ in range(32 * steps // count + 2)]
        rows = np.concatenate(epochs)
        return np.asarray(compiled(jnp.asarray(rates), rows[:steps]))

    return good


def measure_convergence(engine: str, rounds: int) -> None:
    """Finds the largest rate that converges, for each staleness."""
    rows = []
    for (name, task, steps), momentum, scales in itertools.product(
            (("least squares", least_squares, LEAST_STEPS), ("digits", digits, DIGITS_STEPS)), (0.0, 0.9),
            (False, True)):
        found = []
        for staleness in STALENESS:
            good = delayed(task, momentum, scales, staleness, steps)
            always = np.all([good(RATES, seed) for seed in range(rounds)], axis=0)
            found.append(max((rate for rate, is_good in zip(RATES, always, strict=True) if is_good), default=None))
        rows.append([name, momentum or "none", "yes" if scales else "no", *map(as_power, found)])
    write_section("Parameter servers: convergence with stale gradients", f"""
The largest power of two that converges as a learning rate, when every gradient is of the parameters before exactly so
many updates, 0 being synchronous training: simulated in one process, rates from {as_power(RATES[0])} to
{as_power(RATES[-1])}, batches of 32, {rounds} orders of the rows, all of which must converge. Least squares: 1024 rows
of 20, {LEAST_STEPS} steps, to 0.001 of the first loss. Scikit-learn's digits: 1500 rows, 64-32-10, {DIGITS_STEPS}
steps, to 95% of 297 other rows. Gradients are divided as by `staleness="scale"`:
`python benchmarks/parameter_server.py --rounds {rounds} convergence`.

{table(["task", "momentum", "divided by 1 + staleness", *(f"staleness {count}" for count in STALENESS)], rows)}""")


def as_power(rate: float | None) -> str:
    """Returns a power of two as such."""
    return "none" if rate is None else f"2^{int(np.log2(rate))}"


# --- scale ------------------------------------------------------------------------------------------------------------

FAR_WORKERS, FAR_SERVERS, FAR_MEGABYTES = 1000, 100, 100


class _Idle:
    """A worker that takes a given time for whatever it is sent."""

    name = "idle"

    def __init__(self, seconds: float):
        self._seconds = seconds

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        return None

    def call_packed(self, method: str, packed: Any, timeout: float | None = None) -> Any:
        time.sleep(self._seconds)

    def kill(self) -> None:
        pass


def chief_alone(workers: int, seconds: float, rounds: int) -> list[float]:
    """Returns closures per second of the chief's queue with threads of workers that are not there."""
    class Strategy:
        _coordinator: Any

    strategy, rates = Strategy(), []
    coordinator = ClusterCoordinator._of(strategy, [_Idle(seconds) for _ in range(workers)], lambda _: _Idle(0), None)
    for _ in range(rounds):
        count, begin = max(2000, 2 * workers), time.perf_counter()
        for _ in range(count):
            coordinator.schedule(nothing)
        coordinator.join()
        rates.append(count / (time.perf_counter() - begin))
    coordinator.close()
    return rates


def simulated(workers: int, compute: float, chief: float, server: float, fan_out: float, steps: int = 8) -> float:
    """Returns steps per second of a cluster whose chief and servers answer one after the other.

    All servers have equal parts of each step: one stands for all.

    Args:
      workers: how many.
      compute: seconds of a step on a worker.
      chief: seconds of the chief for a step.
      server: seconds of each server for a pull, and for a push.
      fan_out: seconds of a worker to ask all servers once.
      steps: of each worker.
    """
    free = {"chief": 0.0, "server": 0.0}
    stages = (("chief", chief, 0.0), ("server", server, fan_out), ("server", server, compute + fan_out))
    waiting = [(0.0, number, 0) for number in range(workers)]  # when, which worker, which stage of all its steps
    end = 0.0
    while waiting:
        now, worker, stage = heapq.heappop(waiting)
        if stage == len(stages) * steps:
            end = max(end, now)
            continue
        resource, seconds, _ = stages[stage % len(stages)]
        free[resource] = max(free[resource], now) + seconds
        after = free[resource] + stages[(stage + 1) % len(stages)][2]
        heapq.heappush(waiting, (after, worker, stage + 1))
    return workers * steps / end


def measure_scale(engine: str, rounds: int) -> None:
    """Computes the throughput of a cluster from costs that are measured here."""
    with strategy_of(engine, 1) as strategy:
        strategy._servers[0].call("ready")
        small, large = (transfers(strategy, megabytes, rounds) for megabytes in (1, 30))
        handle = strategy._servers[0]
        begin = time.perf_counter()
        for _ in range(200):
            handle.call("ready")
        call = (time.perf_counter() - begin) / 200
    costs = {}
    for name in ("pull", "push, with the update"):
        one, thirty = statistics.median(small[name]), statistics.median(large[name])
        costs[name] = call + FAR_MEGABYTES / FAR_SERVERS * (thirty - one) / 29
    server = sum(costs.values()) / 2
    begin = time.perf_counter()
    for _ in range(10):
        on_each([lambda: None] * FAR_SERVERS)
    fan_out = (time.perf_counter() - begin) / 10
    queue = {workers: chief_alone(workers, 0.0, rounds) for workers in (2, 100, FAR_WORKERS)}
    _, _, cpu = closures(engine, rounds)
    chief = statistics.median(cpu)
    rows = []
    for compute in (0.01, 0.1, 1.0, 10.0):
        rates = {count: simulated(count, compute, chief, server, fan_out) for count in (10, 100, FAR_WORKERS)}
        apart = 1 / (compute + 2 * (fan_out + server) + chief)
        rows.append([f"{compute:g}", *(f"{rate:.0f} ({rate / count / apart:.2f})" for count, rate in rates.items()),
                     f"{(1 / apart) / chief:.0f}", f"{(1 / apart) / (2 * server):.0f}"])
    given = f"--engine {engine} --rounds {rounds} scale"
    passed = ", ".join(f"{statistics.median(rates):.0f} with {count} workers" for count, rates in queue.items())
    section("a simulation of many", engine, f"""
Steps a second, and in brackets as a part of what workers reach that never wait, with {FAR_SERVERS} servers and
parameters of {FAR_MEGABYTES} MB. The chief takes {chief * 1e6:.0f} us of CPU for a function, as measured on 2 workers,
a server {server * 1e3:.2f} ms for a pull or push of its {FAR_MEGABYTES // FAR_SERVERS} MB, with the worker's part,
and a worker {fan_out * 1e3:.1f} ms to ask all servers; all answer one after the other, and the network is as fast as
this machine: `python benchmarks/parameter_server.py {given}`. The last columns say how many
workers the chief's queue and the servers can feed.

{table(["step, s", *(f"{count} workers" for count in (10, 100, FAR_WORKERS)), "chief feeds", "servers feed"], rows)}
Functions a second that the chief's queue alone passes, for workers that take no time:
{passed}.""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"calls": measure_calls, "fit": measure_fit, "restart": measure_restart,
             "convergence": measure_convergence, "scale": measure_scale}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[], help="all by default")
    parser.add_argument("--engine", choices=list(ENGINES), default="local")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for part in options.parts or parts:
        parts[part](options.engine, options.rounds)


if __name__ == "__main__":
    main()
