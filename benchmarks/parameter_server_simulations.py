"""Simulations of parameter servers: `python benchmarks/parameter_server_simulations.py [--rounds N] [part ...]`.

`convergence` trains with gradients of exact staleness, in this process, and `scale` computes the speed of a large
cluster from costs that it measures on this machine. Each writes its section of `RESULTS.md`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import table, write_section
from parameter_server import closures, nothing, run_parts, section, strategy_of, transfers

from trainer.distribute.parameter_server.coordinator import ClusterCoordinator
from trainer.distribute.parameter_server.server_calls import call_each

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
`python benchmarks/parameter_server_simulations.py --rounds {rounds} convergence`.

{table(["task", "momentum", "divided by 1 + staleness", *(f"staleness {count}" for count in STALENESS)], rows)}""")


def as_power(rate: float | None) -> str:
    """Returns how a power of two is written."""
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
        call_each([_Idle(0.0)] * FAR_SERVERS, "ready")
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
this machine: `python benchmarks/parameter_server_simulations.py {given}`. The last columns say how many
workers the chief's queue and the servers can feed.

{table(["step, s", *(f"{count} workers" for count in (10, 100, FAR_WORKERS)), "chief feeds", "servers feed"], rows)}
Functions a second that the chief's queue alone passes, for workers that take no time:
{passed}.""")


if __name__ == "__main__":
    run_parts(__doc__, {"convergence": measure_convergence, "scale": measure_scale})
