"""Time to compile a train step under MirroredStrategy, from 2 to 32 replicas on simulated devices.

Run by `make bench-strategies`. Writes its section of `benchmarks/RESULTS.md`. With `--gpus`, which needs the extra
"gpu-programs" and some ten minutes, another: large models compiled for H100s, beside a step written by hand.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

# Simulated devices, whatever the machine has. Must stand before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=32"

import jax
import jax.numpy as jnp
import numpy as np
from gpu.workloads import Workload
from hand_written import MLP, Blocks
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loops_hand import train_step
from measuring import Ratio, alternate, table, write_section
from trainer_models import FEATURES, lowered_train_step, new_model, noise

import trainer
from trainer import distribute
from trainer.core.compile.hlo_text import Program
from trainer.tools.plan.planned_phase import COMPILER_OPTIONS
from trainer.tools.plan.program_contents import kernels

REPLICAS = (2, 8, 32)
BAR, HAND_BAR = 1.2, 1.05
TOPOLOGIES = ("1xh100", "8xh100")


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


def shapes_of_batch(workload: Workload, replicas: int) -> tuple[Any, Any]:
    """Returns the inputs and labels of a batch, as shapes."""
    rows = workload.rows_per_device * replicas
    if (sizes := workload.transformer) is not None:
        return (jax.ShapeDtypeStruct((rows, sizes.tokens), np.int32),) * 2
    side = workload.side
    return jax.ShapeDtypeStruct((rows, side, side, 3), np.float32), jax.ShapeDtypeStruct((rows,), np.int32)


def compiled_by_hand(workload: Workload, devices: list[Any]) -> Any:
    """Returns a jitted step that donates its state, compiled; over several devices XLA divides it."""
    module, tx = workload.module(jnp.bfloat16), workload.optimizer()
    mesh = Mesh(np.asarray(devices), ("replica",))

    def placed(tree: Any, *axes: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    x, y = placed(shapes_of_batch(workload, len(devices)), "replica")

    def initial(x: Any) -> Any:
        variables = dict(module.init(jax.random.key(0), x))
        params = variables.pop("params")
        return params, variables, tx.init(params)

    state = placed(jax.eval_shape(initial, jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)))
    step = jax.jit(train_step(module, tx, workload.has_accuracy), donate_argnums=0)
    return step.lower(state, x, y).compile(COMPILER_OPTIONS)


def compiled_for_fit(workload: Workload, devices: list[Any]) -> Any:
    """Returns the step that `fit` would run, compiled."""
    strategy = distribute.MirroredStrategy(devices)
    with strategy.scope():
        model = trainer.Model(workload.module())
        model.compile(workload.optimizer(), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"] if workload.has_accuracy else None, precision="mixed_bfloat16")
    batch = tuple(np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
                  for leaf in shapes_of_batch(workload, len(devices)))
    lowered = lowered_train_step(strategy, model, *batch, steps_per_execution=1)
    return lowered.compile({**strategy.compiler_options(), **COMPILER_OPTIONS})


def operations(program: Program) -> int:
    """Returns the number of operations of a program; fused operations count singly."""
    return sum(len(computation) for computation in program.computations.values())


def beside_a_step_by_hand(name: str, topology: str, rounds: int) -> list[Any]:
    """Returns a row of the table: a model on some GPUs."""
    workload = Workload(name, 128 if name == "resnet50" else 8, steps=1)
    devices = distribute.described_devices(topology)
    found: dict[str, Any] = {}

    def contestant(make: Any) -> Any:
        def compile_once(number: int) -> None:
            jax.clear_caches()
            found[make.__name__] = make(workload, devices)

        return compile_once

    makers = compiled_for_fit, compiled_by_hand
    ours, theirs = alternate({make.__name__: contestant(make) for make in makers}, rounds).values()
    programs = [Program(found[make.__name__].as_text()) for make in makers]
    counts = [(count(programs[0]), count(programs[0]) / count(programs[1])) for count in (operations, kernels)]
    return [name, topology, *(cell for count, ratio in counts for cell in (count, f"{ratio:.3f}")),
            f"{np.median(ours.seconds):.1f}", Ratio.of(ours.seconds, theirs.seconds),
            Ratio.of(ours.cpu_seconds, theirs.cpu_seconds)]


def write_programs_for_gpus(rounds: int, models: list[str]) -> None:
    """Measures, prints and writes how programs for H100s compare with those of steps by hand."""
    rows = []
    for name in models:
        for topology in TOPOLOGIES:
            rows.append(beside_a_step_by_hand(name, topology, rounds))
            print(*rows[-1], flush=True)
    write_section("Programs for H100s, beside a step by hand", f"""
A train step in mixed bfloat16 as XLA compiles it for H100s that are only described, `fit`'s in the ratio to a jitted
step by hand that donates its state (Flax, optax; XLA divides it over the devices): the operations of the optimized
program, fused ones one by one, its kernels, and the seconds to trace, lower and compile, caches cleared each time.
ResNet-50 has 128 rows of 224x224 on each device, and the accuracy; GPT-2 small 8 rows of 1024 tokens. {rounds} rounds
in turn after one that warms up: `python benchmarks/compile_time.py --gpus`. The bar is {HAND_BAR}.

Over eight GPUs `fit`'s step is replicated, and the step by hand is one program that XLA divides.

{table(["model", "devices", "operations", "ratio", "kernels", "ratio", "seconds", "ratio", "in CPU time"], rows)}""")


def main() -> None:
    """Measures, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpus", nargs="*", metavar="MODEL", help="'resnet50', 'gpt2'; both by default")
    arguments = parser.parse_args()
    if arguments.gpus is not None:
        write_programs_for_gpus(arguments.rounds, arguments.gpus or ["resnet50", "gpt2"])
        return
    rounds = arguments.rounds
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
