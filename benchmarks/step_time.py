"""Microseconds per training step of `Model.fit`, of a hand-written JAX loop, and of Keras on JAX.

Each contender trains the same network on the same arrays; the first epoch, which compiles, is not counted.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
from flax import linen as nn

import trainer

EPOCHS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One network, from its inputs over one hidden layer to its classes, and its data."""

    inputs: int
    hidden: int
    classes: int
    rows: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.inputs}-{self.hidden}-{self.classes}, batch {self.batch_size}"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.normal(size=(self.rows, self.inputs)).astype(np.float32)
        return images, rng.integers(0, self.classes, self.rows)

    def module(self) -> nn.Module:
        return nn.Sequential([nn.Dense(self.hidden), nn.relu, nn.Dense(self.classes)])


CASES = (
    Case(inputs=8, hidden=8, classes=3, rows=12_800, batch_size=32),
    Case(inputs=784, hidden=128, classes=10, rows=12_800, batch_size=32),
)


def trainer_fit(case: Case) -> Callable[[int], object]:
    """Returns a function that trains for some epochs with `trainer.Model.fit`."""
    images, labels = case.data()
    model = trainer.Model(case.module())
    model.compile("adam", trainer.losses.SparseCategoricalCrossentropy(from_logits=True))
    return lambda epochs: model.fit(images, labels, batch_size=case.batch_size, epochs=epochs, verbose=0)


def hand_written(case: Case) -> Callable[[int], object]:
    """Returns a function that trains for some epochs with the loop of an optax tutorial."""
    images, labels = case.data()
    module, optimizer = case.module(), optax.adam(1e-3)
    params = module.init(jax.random.key(0), images[:1])
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, x, y):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(module.apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    def train(epochs: int) -> None:
        nonlocal params, opt_state
        rng = np.random.default_rng(0)
        for _ in range(epochs):
            order = rng.permutation(case.rows)
            for start in range(0, case.rows, case.batch_size):
                rows = order[start:start + case.batch_size]
                params, opt_state, loss = step(params, opt_state, images[rows], labels[rows])
        jax.block_until_ready(loss)

    return train


def keras_fit(case: Case) -> Callable[[int], object]:
    """Returns a function that trains for some epochs with `keras.Model.fit`."""
    images, labels = case.data()
    model = keras.Sequential([keras.layers.Dense(case.hidden, activation="relu"), keras.layers.Dense(case.classes)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return lambda epochs: model.fit(images, labels, batch_size=case.batch_size, epochs=epochs, verbose=0)


def microseconds_per_step(case: Case, contender: Callable[[Case], Callable[[int], object]]) -> float:
    """Returns the wall time of one step, averaged over `EPOCHS` epochs after one that compiles."""
    train = contender(case)
    train(1)
    start = time.perf_counter()
    train(EPOCHS)
    return 1e6 * (time.perf_counter() - start) / (EPOCHS * case.rows / case.batch_size)


def main() -> None:
    contenders = (trainer_fit, hand_written, keras_fit)
    print(f"{'microseconds per step':24}" + "".join(f"{contender.__name__:>14}" for contender in contenders))
    for case in CASES:
        print(f"{case!s:24}" + "".join(f"{microseconds_per_step(case, contender):14.0f}" for contender in contenders))


if __name__ == "__main__":
    main()
