"""Time to compile a train step under MirroredStrategy, from 2 to 32 replicas on simulated devices.

Run by `make bench-strategies`. Writes its section of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import os
import time

# Simulated devices, whatever the machine has. Must stand before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=32"

import jax
import jax.numpy as jnp
import numpy as np
from hand_written import MLP, Blocks
from measuring import Ratio, table, write_section
from trainer_models import FEATURES, lowered_train_step, new_model, noise

import trainer
from trainer import distribute

REPLICAS = (2, 8, 32)
BAR = 1.2


class LargestOutput(trainer.metrics.Metric):
    """The largest output so far: it is not summed over the replicas, but merged, one after another."""

    additive = False

    def __init__(self, name="largest_output", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable(initializer=lambda shape, dtype: jnp.full(shape, -jnp.inf, dtype))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(jnp.maximum(self.largest.value, y_pred.max()))

    def merge_variables(self, first, second):
        return [jnp.maximum(first[0], second[0])]

    def result(self):
        return self.largest.value


CASES = {
    "784, 128, 10": (MLP((128,)), FEATURES, lambda: ["accuracy"]),
    "4 blocks of 64": (Blocks(64, 4), 64, lambda: ["accuracy"]),
    "784, 128, 10 and a metric that does not add": (MLP((128,)), FEATURES, lambda: [LargestOutput()]),
}


def compile_seconds(replicas: int, module, features: int, make_metrics) -> tuple[float, float, float]:
    """Returns the seconds to trace and lower the train step of a model over so many replicas, and to compile it, and
    the CPU time of both."""
    strategy = distribute.MirroredStrategy(list(range(replicas)))
    model = new_model(strategy, module, "adam", metrics=make_metrics())
    x, y = noise(8 * replicas, features)
    jax.clear_caches()
    cpu_start, start = time.process_time(), time.perf_counter()
    lowered = lowered_train_step(strategy, model, x, y)
    middle = time.perf_counter()
    lowered.compile()
    return middle - start, time.perf_counter() - middle, time.process_time() - cpu_start


def main() -> None:
    """Measures, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows = []
    for name, case in CASES.items():
        found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in REPLICAS}
        for number in range(rounds + 1):
            for count in REPLICAS:
                seconds = compile_seconds(count, *case)
                if number:  # the first round warms up
                    found[count].append(seconds)
        tracing, compiling, cpu = ({count: np.array(parts)[:, column] for count, parts in found.items()}
                                   for column in range(3))
        medians = [f"{np.median(tracing[count]):.2f} + {np.median(compiling[count]):.2f}" for count in REPLICAS]
        rows.append([name, *medians,
                     *(Ratio.of(tracing[count] + compiling[count], tracing[REPLICAS[0]] + compiling[REPLICAS[0]])
                       for count in REPLICAS[1:]), Ratio.of(cpu[REPLICAS[-1]], cpu[REPLICAS[0]])])
    write_section("Time to compile a train step", f"""
Seconds to trace and lower, plus seconds to compile, `fit`'s train step under MirroredStrategy over some of
{REPLICAS[-1]} simulated devices, caches cleared each time. {rounds} rounds in turn after one that warms up:
`python benchmarks/compile_time.py`. The bar is {BAR} from {REPLICAS[0]} to {REPLICAS[-1]} replicas.

{table(["model", *(f"{count} replicas, s" for count in REPLICAS),
        *(f"{count} to {REPLICAS[0]}" for count in REPLICAS[1:]), f"{REPLICAS[-1]} to {REPLICAS[0]} in CPU time"],
       rows)}""")


if __name__ == "__main__":
    main()
