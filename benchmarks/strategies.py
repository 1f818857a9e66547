"""Costs of the strategies on simulated devices: time, against loops written by hand, and memory.

Run by `make bench-strategies`. Writes its sections of `benchmarks/RESULTS.md`. Some of its parts can be named:
`python benchmarks/strategies.py run memory`.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator, Mapping

# Simulated devices, whatever the machine has. Must stand before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import hand_written
import jax
import numpy as np
import optax
from hand_written import MLP, Blocks, ReplicatedStep
from measuring import Ratio, Timings, alternate, contenders, fastest, table, write_section
from trainer_models import FEATURES, OwnStep, lowered_train_step, new_model, noise

import trainer
from trainer import distribute
from trainer.models.vision.resnet import ResNet
from trainer.tools.plan.program_contents import peak_bytes

DEVICES = jax.device_count()
BATCH_SIZE = 256
OPTIMIZERS = {"sgd": lambda: optax.sgd(0.01), "adam": lambda: optax.adam(1e-3)}
BAR = 1.1
LIVE_BYTES = 2e9


def ratios(timings: Mapping[str, Timings], ours: str, theirs: str) -> tuple[Ratio, Ratio]:
    """Returns the ratios of our time and of our CPU time to theirs."""
    return (Ratio.of(timings[ours].seconds, timings[theirs].seconds),
            Ratio.of(timings[ours].cpu_seconds, timings[theirs].cpu_seconds))


# --- strategy.run in a loop of one's own ---------------------------------------------------------------------------


def loop_of_run(hidden, optimizer: str, steps: int) -> Callable[[int], None]:
    """Returns a function that takes train steps with `strategy.run` on batches that are on the devices already."""
    strategy = distribute.MirroredStrategy()
    x, y = noise(4 * BATCH_SIZE)
    model = new_model(strategy, MLP(hidden), optimizer)
    model.build(x)
    batches = list(strategy.experimental_distribute_dataset(
        trainer.data.Dataset.from_arrays((x, y)).batch(BATCH_SIZE)))

    def step(state, inputs):
        x, y = inputs

        def loss_fn(params):
            logits, model_state = model.apply(params, state, x, training=True)
            return model.compute_loss(x, y, logits, None), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, model_state=model_state), loss

    carry = [model.state]

    def loop(number):
        for index in range(steps):
            carry[0], _ = strategy.run(step, args=(carry[0], batches[index % len(batches)]))
        jax.block_until_ready(carry[0])

    return loop


def loop_by_hand(hidden, optimizer: str, steps: int, mean: str, donates: bool) -> Callable[[int], None]:
    """Returns a function that takes the same train steps on the same batches, written by hand."""
    x, y = noise(4 * BATCH_SIZE)
    step = ReplicatedStep(MLP(hidden), OPTIMIZERS[optimizer](), x, mean=mean, donates=donates)
    batches = [step.place(x[start:start + BATCH_SIZE], y[start:start + BATCH_SIZE])
               for start in range(0, len(x), BATCH_SIZE)]

    def loop(number):
        for index in range(steps):
            step(*batches[index % len(batches)])
        step.wait()

    return loop


def measure_run(rounds: int) -> None:
    """Measures `strategy.run` against the same step written by hand."""
    rows = []
    for hidden, optimizer, steps in (((128,), "sgd", 20), ((128,), "adam", 20), ((64,) * 10, "adam", 10),
                                     ((1024, 1024), "adam", 3)):
        by_hand = functools.partial(loop_by_hand, hidden, optimizer)
        loops, peers = {"run": loop_of_run(hidden, optimizer, steps)}, {}
        for donates in (False, True):
            means = contenders({mean: by_hand(2, mean, donates) for mean in hand_written.MEANS})
            peers[donates] = {f"{mean}{', donating' * donates}": by_hand(steps, mean, donates) for mean in means}
            loops |= peers[donates]
        timings = alternate(loops, rounds)
        keeping, donating = (fastest(timings, list(peers[donates])) for donates in (False, True))
        rows.append([layers(hidden), optimizer, *(millis(timings[name], steps) for name in ("run", keeping)), keeping,
                     *ratios(timings, "run", keeping), f"{ratios(timings, 'run', donating)[0]}, {donating}"])
    write_section("A step of strategy.run", f"""
The train step of a loop of one's own, `strategy.run(step, args=(state, inputs))` with a TrainState, under
MirroredStrategy, against the same step with `jax.jit(jax.shard_map(...))` and optax. Batches of {BATCH_SIZE} rows are
on the devices already. By hand the mean of the gradients is taken of the tree or of one flat vector; the faster one
counts. `run` keeps the state that it is given, and so does the loop by hand; the last column is against one that
donates it. {rounds} rounds in turn after one that compiles: `python benchmarks/strategies.py run`. The bar is
{BAR}.

{table(["model", "optimizer", "run, ms", "by hand, ms", "mean of", "ratio", "ratio of CPU time", "to a donating loop"],
       rows)}""")


def layers(hidden) -> str:
    """Returns the widths of an MLP as text."""
    widths = f"{hidden[0]}" if len(hidden) == 1 else f"{hidden[0]} x {len(hidden)}"
    return f"{FEATURES}, {widths}, {hand_written.CLASSES}"


def millis(timing, steps: int) -> str:
    """Returns the median time of a step in milliseconds."""
    return f"{float(np.median(timing.seconds)) / steps * 1e3:.1f}"


# --- memory --------------------------------------------------------------------------------------------------------


def megabytes(size: float) -> str:
    """Returns bytes as text in MB."""
    return f"{size / 1e6:.1f}"


def state_bytes(strategy: distribute.Strategy, model: trainer.Model, x) -> int:
    """Returns the bytes of parameters and optimizer state that each device holds between steps, from shapes alone."""
    shapes = model.state_shapes(x)
    shardings = strategy.state_shardings(shapes)
    return sum(int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf, sharding in zip(
        jax.tree.leaves((shapes.params, shapes.opt_state)),
        jax.tree.leaves((shardings.params, shardings.opt_state)), strict=True))


def live_bytes(model: trainer.Model, x) -> list[int]:
    """Returns the bytes of parameters and optimizer state that each device does hold once the model is built."""
    model.build(x)
    held = dict.fromkeys(jax.devices(), 0)
    state = model.current_run.state
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def measure_memory(rounds: int) -> None:
    """Measures the bytes that each device holds between steps, and the peak in a step: once, as no round differs."""
    big, small, x_big = Blocks(1024, 12), Blocks(1024, 1), noise(64, 1024)
    strategies = {
        "MirroredStrategy": distribute.MirroredStrategy,
        "FullyShardedStrategy": distribute.FullyShardedStrategy,
        'FullyShardedStrategy(level="optimizer")': lambda: distribute.FullyShardedStrategy(level="optimizer"),
        "CentralStorageStrategy": distribute.CentralStorageStrategy,
    }
    rows, weights, whole = [], {}, {}
    for name, make in strategies.items():
        strategy = make()
        expected = {}
        for size, module in (("big", big), ("small", small)):
            model = new_model(strategy, module, "adam", metrics=["accuracy"])
            expected[size] = state_bytes(strategy, model, x_big[0])
            weights[size] = sum(leaf.size for leaf in jax.tree.leaves(model.state_shapes(x_big[0]).params))
        peak = peak_bytes(lowered_train_step(
            strategy, new_model(strategy, big, "adam", metrics=["accuracy"]), *x_big).compile())
        whole.setdefault("state", expected["big"])
        whole.setdefault("peak", peak)
        live_of = "big" if expected["big"] * DEVICES < LIVE_BYTES else "small"
        live = live_bytes(new_model(strategy, big if live_of == "big" else small, "adam"), x_big[0])
        rows.append([f"`{name}`", megabytes(expected["big"]), f"{expected['big'] / whole['state']:.4f}",
                     megabytes(peak), f"{peak / whole['peak']:.2f}",
                     f"{megabytes(min(live))} to {megabytes(max(live))} of {weights[live_of] / 1e6:.1f} M",
                     f"{max(live) / expected[live_of]:.4f}"])
    write_section("Memory of a device", f"""
A model of {weights["big"] / 1e6:.1f} M parameters with Adam on {DEVICES} simulated devices, a batch of {len(x_big[0])}
rows: MB of parameters and optimizer state that each device holds between steps, and MB of a train step at its peak
(arguments, temporary buffers and outputs, less what aliases: XLA's `memory_analysis` of the compiled step). Next to
each stands its ratio to MirroredStrategy's. Live are the buffers of a model that was built, a smaller one where all
devices together would hold more than {LIVE_BYTES / 1e9:.0f} GB; their ratio is to what the shapes of that model say.
CentralStorageStrategy keeps its state in host memory between steps; simulated devices have no other, so its peak counts
it. `python benchmarks/strategies.py memory`. The bars: FullyShardedStrategy's state within 5 % of 1/{DEVICES} of
MirroredStrategy's, its peak below.

{table(["strategy", "state, MB", "ratio", "peak of a step, MB", "ratio", "live, MB", "ratio to expected"], rows)}""")


# --- lowerings -----------------------------------------------------------------------------------------------------


def measure_lowerings(rounds: int) -> None:
    """Measures `fit` where replicas compute their rows, and where XLA divides the step, of the same models."""
    strategy, steps = distribute.MirroredStrategy(), 10
    images = np.random.default_rng(0).normal(size=(32 * steps, 32, 32, 3)).astype(np.float32)
    cnn = ResNet(blocks=(1,), num_classes=hand_written.CLASSES, classifier_activation=None)
    rows = [*_lowerings(layers((128,)), strategy, MLP((128,)), noise(BATCH_SIZE * steps), steps, rounds),
            *_lowerings("a ResNet of one block", strategy, cnn, (images, noise(len(images))[1]), steps, rounds)]
    write_section("Replicated and partitioned steps", f"""
`fit` under MirroredStrategy on {DEVICES} simulated devices, with Adam: of `trainer.Model`, whose replicas compute their
rows, and of a subclass whose `train_step` calls the default one, which XLA divides. The MLP has batches of {BATCH_SIZE}
rows, the ResNet of 32 images, 32 x 32. Compiling is to trace, lower and compile a step. {rounds} rounds in turn after
one that compiles, and half as many of compiling: `python benchmarks/strategies.py lowerings`.

{table(["model", "of", "replicated, ms", "partitioned, ms", "ratio", "ratio of CPU time"], rows)}""")


def _lowerings(name: str, strategy: distribute.Strategy, module, data, steps: int, rounds: int) -> Iterator[list]:
    """Yields rows of the table: the times of a step and of its compilation in both lowerings."""
    (x, y), batch_size = data, len(data[0]) // steps
    models = {"replicated": new_model(strategy, module, "adam"),
              "partitioned": new_model(strategy, module, "adam", make=OwnStep)}

    def fit(number: int, model: trainer.Model) -> None:
        model.fit(x, y, batch_size=batch_size, verbose=0)

    def compile_step(number: int, model: trainer.Model) -> None:
        jax.clear_caches()
        lowered_train_step(strategy, model, x[:batch_size], y[:batch_size]).compile()

    for what, function, count, turns in (("a step", fit, steps, rounds), ("compiling", compile_step, 1, rounds // 2)):
        timings = alternate({key: functools.partial(function, model=model) for key, model in models.items()}, turns)
        yield [name, what, *(millis(timings[key], count) for key in models),
               *ratios(timings, "partitioned", "replicated")]


PARTS = {"run": measure_run, "memory": measure_memory, "lowerings": measure_lowerings}


def main() -> None:
    """Measures the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=11, help="of `run` and `lowerings`")
    options = parser.parse_args()
    names = options.parts or list(PARTS)
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"unknown parts: {', '.join(unknown)}; known are {', '.join(PARTS)}")
    for name in names:
        PARTS[name](options.rounds)


if __name__ == "__main__":
    main()
