"""Time of a train step: the default `fit` against a `jax.jit` loop written by hand, over the same batches.

Run by `make bench`. The rounds alternate, so that both meet the same noise; the ratio of each round counts, and the
median over the rounds is what is quoted. Writes `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import platform
import statistics
import time

import flax
import jax
import numpy as np
import optax
from flax import linen as nn

import trainer

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
BATCH_SIZE = 32


class MLP(nn.Module):
    """784-128-10."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


def by_hand(x, y):
    """Returns a function that trains for one epoch as a careful user of JAX writes it: jitted, donating, no sync."""
    module, tx = MLP(), optax.adam(1e-3)
    params = module.init(jax.random.key(0), x[:1])
    carry = [params, tx.init(params)]

    def step(params, opt_state, x, y):
        def loss_and_logits(params):
            logits = module.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_and_logits, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, (logits.argmax(-1) == y).mean()

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def epoch(number):
        order = np.random.default_rng(number).permutation(len(x))
        logs = []
        for start in range(0, len(x), BATCH_SIZE):
            rows = order[start:start + BATCH_SIZE]
            carry[0], carry[1], loss, accuracy = compiled(*carry, x[rows], y[rows])
            logs.append((loss, accuracy))
        return np.mean(jax.device_get(logs), axis=0)

    return epoch


def by_fit(x, y):
    """Returns a function that trains for one epoch with `fit` and default settings."""
    model = trainer.Model(MLP())
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return lambda number: model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)


def main():
    """Measures, prints each round, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.rows, 784)).astype(np.float32)
    y = rng.integers(0, 10, options.rows).astype(np.int32)
    steps = -(-options.rows // BATCH_SIZE)
    loops = {"hand-written jit loop": by_hand(x, y), "fit": by_fit(x, y)}
    micros: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(-1, options.rounds):
        for name, epoch in loops.items():
            start = time.perf_counter()
            epoch(number + 1)
            if number >= 0:  # the first round compiles
                micros[name].append((time.perf_counter() - start) / steps * 1e6)
        if number >= 0:
            print("  ".join(f"{name} {times[-1]:.0f} us/step" for name, times in micros.items()), flush=True)
    ratios = sorted(fit / hand for fit, hand in zip(micros["fit"], micros["hand-written jit loop"], strict=True))
    median, low, high = statistics.median(ratios), ratios[0], ratios[-1]
    print(f"fit / hand-written: median {median:.2f}, from {low:.2f} to {high:.2f} over {len(ratios)} rounds")
    device = jax.devices()[0]
    RESULTS.write_text(f"""# Results

Written by `make bench` on {datetime.date.today()}: {platform.machine()}, {os.cpu_count()} cores, {device.device_kind};
Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}.
The machine is shared and noisy: the ratios count, not the microseconds.

## Time of a train step

784-128-10, {options.rows:,} rows of noise, batch {BATCH_SIZE}, adam, accuracy, verbose=0, default settings. One epoch
of each in turn, {len(ratios)} rounds in one run after one that compiles: `python benchmarks/step_time.py`.

| loop | median us/step | least | most |
| --- | --- | --- | --- |
""" + "".join(f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} |\n"
              for name, times in micros.items())
                       + f"\n`fit` takes {median:.2f}x the hand-written loop's time (median over the rounds; "
                         f"from {low:.2f}x to {high:.2f}x).\n")


if __name__ == "__main__":
    main()
