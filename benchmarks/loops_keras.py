"""Keras 3 on JAX, and the models in Keras. Each loop comes with several `steps_per_execution`: the fastest counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

os.environ["KERAS_BACKEND"] = "jax"  # read by the import of Keras

import keras
from cases import Workload
from keras import layers

STEPS_PER_EXECUTION = (1, 32)


class LanguageModel(keras.Model):
    """A causal transformer."""

    def __init__(self, vocabulary: int, tokens: int, width: int = 128, depth: int = 2, heads: int = 4):
        super().__init__()
        self.embed, self.embed_position = layers.Embedding(vocabulary, width), layers.Embedding(tokens, width)
        self.norms = [layers.LayerNormalization() for _ in range(2 * depth)]
        self.attention = [layers.MultiHeadAttention(heads, width // heads) for _ in range(depth)]
        self.wide = [layers.Dense(4 * width, "gelu") for _ in range(depth)]
        self.narrow = [layers.Dense(width) for _ in range(depth)]
        self.last, self.head = layers.LayerNormalization(), layers.Dense(vocabulary)

    def call(self, tokens):
        x = self.embed(tokens) + self.embed_position(keras.ops.arange(tokens.shape[1]))
        for index, attention in enumerate(self.attention):
            normed = self.norms[2 * index](x)
            x = x + attention(normed, normed, use_causal_mask=True)
            x = x + self.narrow[index](self.wide[index](self.norms[2 * index + 1](x)))
        return self.head(self.last(x))


def new_model(workload: Workload, steps_per_execution: int) -> keras.Model:
    """Returns the model of a workload, compiled."""
    classes = workload.classes

    def cnn(width):
        return keras.Sequential([
            layers.Conv2D(width, 3, padding="same", activation="relu"), layers.MaxPool2D(),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"), layers.MaxPool2D(), layers.Flatten(),
            layers.Dense(4 * width, "relu"), layers.Dense(classes)])

    model = {
        "mlp": lambda: keras.Sequential([layers.Dense(128, "relu"), layers.Dense(classes)]),
        "small_mlp": lambda: keras.Sequential([layers.Dense(8, "relu"), layers.Dense(classes)]),
        "cnn": lambda: cnn(32),
        "small_cnn": lambda: cnn(16),
        "mobilenet": lambda: keras.applications.MobileNetV2(
            weights=None, input_shape=(96, 96, 3), classes=classes, classifier_activation=None),
        "lm": lambda: LanguageModel(classes, tokens=64),
    }[workload.model]()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                  steps_per_execution=steps_per_execution)
    return model


def _candidates(
    workload: Workload, call: Callable, counts: Sequence[int] = STEPS_PER_EXECUTION
) -> dict[str, Callable[[int], int]]:
    data = workload.data()
    if workload.replicas > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())

    def candidate(count):
        model = new_model(workload, count)

        def run(epochs):
            call(model, *data, epochs)
            return epochs * workload.steps

        return run

    return {f"steps_per_execution={count}": candidate(count) for count in counts
            if count <= workload.steps}


def fit(workload: Workload, counts: Sequence[int] = STEPS_PER_EXECUTION) -> dict[str, Callable[[int], int]]:
    """Calls `fit` once for all epochs."""
    return _candidates(workload, lambda model, x, y, epochs: model.fit(
        x, y, batch_size=workload.batch_size, epochs=epochs, verbose=0), counts)


def fit_by_default(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Calls `fit` once for all epochs, with Keras's default of one step per execution."""
    return fit(workload, counts=(1,))


def evaluate(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Calls `evaluate` for each epoch."""
    return _candidates(workload, lambda model, x, y, epochs: [
        model.evaluate(x, y, batch_size=workload.batch_size, verbose=0) for _ in range(epochs)])


def predict(workload: Workload) -> dict[str, Callable[[int], int]]:
    """Calls `predict` for each epoch."""
    return _candidates(workload, lambda model, x, y, epochs: [
        model.predict(x, batch_size=workload.batch_size, verbose=0) for _ in range(epochs)])
