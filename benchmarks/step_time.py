"""Time of a train step: the default `fit` against a `jax.jit` loop written by hand, over the same batches.

Run by `make bench`. Writes its section of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import statistics

import jax
import numpy as np
import optax
from flax import linen as nn
from measuring import Ratio, alternate, table, write_section

import trainer

BATCH_SIZE = 32
HAND_WRITTEN, FIT = "hand-written jit loop", "fit"


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
    """Measures, prints the results and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.rows, 784)).astype(np.float32)
    y = rng.integers(0, 10, options.rows).astype(np.int32)
    steps = -(-options.rows // BATCH_SIZE)
    timings = alternate({HAND_WRITTEN: by_hand(x, y), FIT: by_fit(x, y)}, options.rounds)
    micros = {name: [seconds / steps * 1e6 for seconds in timing.seconds] for name, timing in timings.items()}
    ratio = Ratio.of(timings[FIT].seconds, timings[HAND_WRITTEN].seconds)
    write_section("Time of a train step", f"""
784-128-10, {options.rows:,} rows of noise, batch {BATCH_SIZE}, adam, accuracy, verbose=0, default settings. One epoch
of each in turn, {options.rounds} rounds in one run after one that compiles: `python benchmarks/step_time.py`.

{table(["loop", "median us/step", "least", "most"],
       [[name, *(f"{figure(times):.0f}" for figure in (statistics.median, min, max))]
        for name, times in micros.items()])}
`fit` takes {ratio.median:.2f}x the hand-written loop's time (median over the rounds; from {ratio.of_rounds[0]:.2f}x to
{ratio.of_rounds[-1]:.2f}x).
""")


if __name__ == "__main__":
    main()
