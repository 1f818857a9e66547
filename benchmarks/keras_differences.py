"""How far our models are from those of `keras.applications` with the same weights.

    PYTHONPATH=. python benchmarks/keras_differences.py [--only ResNet50 ...] [--families]

Of each model: the largest difference of a probability, over images of two sizes; of BatchNorm's statistics after 12
steps at learning rate 0, as a part of the layer's largest statistic; and, where nothing is drawn at random, the
distance of the weights from Keras's after a step of SGD, as a part of the step.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import warnings

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
from measuring import table, write_section

import trainer
from tests.support import keras_twin_cases, keras_twins
from trainer import models

STEPS, ROWS, RATE = 12, 8, 1e-4
DROP_BLOCKS = ("EfficientNetB0", "EfficientNetB1")  # at random, in training
DROP_INPUTS = (*DROP_BLOCKS, "MobileNet", "MobileNetV3Small", "MobileNetV3Large")  # of the classifier at least


def prediction(twin: keras_twin_cases.Twin, path: pathlib.Path) -> list[float]:
    """Returns the largest differences of probabilities at each size."""
    theirs, first = twin.theirs(keras, twin.sizes[0]), twin.images(twin.sizes[0])
    keras_twins.scaled_head(keras, keras_twins.settled(keras, theirs, first), first)
    ours = keras_twins.twin(theirs, twin.ours(), twin.sizes[0], path)
    differences = []
    for size in twin.sizes:
        theirs = twin.theirs(keras, size)
        theirs.load_weights(path)
        differences.append(keras_twins.difference(theirs, ours, twin.images(size)))
    return differences


def loaded(twin: keras_twin_cases.Twin, path: pathlib.Path) -> tuple[keras.Model, trainer.Model]:
    """Returns both models with the weights of a file."""
    theirs = twin.theirs(keras, twin.sizes[0])
    theirs.load_weights(path)
    return theirs, keras_twins.twin(theirs, twin.ours(), twin.sizes[0], path)


def statistics(twin: keras_twin_cases.Twin, path: pathlib.Path) -> float | None:
    """Returns the largest difference of running averages after steps at learning rate 0.

    It is None without BatchNorm, or where chance is in it.
    """
    if twin.name in DROP_BLOCKS:
        return None
    theirs, ours = loaded(twin, path)
    if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in theirs.layers):
        return None
    images = np.concatenate([twin.images(twin.sizes[0], ROWS, seed) for seed in range(STEPS)])
    labels = np.zeros(len(images), np.int32)
    theirs.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    theirs.fit(images, labels, batch_size=ROWS, shuffle=False, verbose=0)
    ours.compile(optax.sgd(0.0), "sparse_categorical_crossentropy")
    ours.fit(images, labels, batch_size=ROWS, shuffle=False, verbose=0)
    received = ours.state.model_state["batch_stats"]
    theirs.save_weights(path.with_name("after.weights.h5"))
    models.load_keras_weights(ours, path.with_name("after.weights.h5"))
    expected = ours.state.model_state["batch_stats"]

    def difference(layer: dict, other: dict) -> float:
        scale = other["var"].max()
        return max(abs(layer["mean"] - other["mean"]).max() / np.sqrt(scale),
                   abs(layer["var"] - other["var"]).max() / scale)

    return float(max(jax.tree.leaves(jax.tree.map(
        difference, received, expected, is_leaf=lambda part: "var" in part))))


def step(twin: keras_twin_cases.Twin, path: pathlib.Path) -> float | None:
    """Returns how far the parameters are apart after a step, as a part of its length; None where chance is in it."""
    if twin.name in DROP_INPUTS:
        return None
    theirs, ours = loaded(twin, path)
    images, labels = twin.images(twin.sizes[0], ROWS), np.arange(ROWS) % 10
    begin = ours.state.params
    theirs.compile(keras.optimizers.SGD(RATE), "sparse_categorical_crossentropy")
    theirs.train_on_batch(images, labels)
    theirs.save_weights(path.with_name("after.weights.h5"))
    ours.compile(optax.sgd(RATE), "sparse_categorical_crossentropy")
    ours.train_on_batch(images, labels)
    received = ours.state.params
    models.load_keras_weights(ours, path.with_name("after.weights.h5"))
    expected = ours.state.params

    def length(one, other) -> float:
        return float(optax.tree.norm(jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, one, other)))

    return length(received, expected) / length(expected, begin)


def number(value: float | None) -> str:
    """Returns a number with two digits, and a dash for none."""
    return "-" if value is None else f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--families", action="store_true", help="one model of each family")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "__array__ implementation")
    rows = []
    for twin in keras_twin_cases.FAMILIES + ([] if options.families else keras_twin_cases.OTHERS):
        if options.only and twin.name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "theirs.weights.h5"
            differences = prediction(twin, path)
            arguments = ", ".join(f"{name}={value}" for name, value in twin.options.items())
            sizes = ", ".join("x".join(map(str, keras_twins.sides(size))) for size in twin.sizes)
            rows.append([twin.name, arguments, sizes, number(max(differences)), number(statistics(twin, path)),
                         number(step(twin, path))])
            print(*rows[-1], flush=True)
        keras.backend.clear_session()
        jax.clear_caches()
    body = table(["Model", "Arguments", "Images", "Probabilities", "Statistics", "Step"], rows)
    write_section("Differences from Keras", f"{__doc__.strip()}\n\n{body}")


if __name__ == "__main__":
    main()
