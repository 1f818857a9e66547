"""Writes losses.json: what Keras computes for the losses that `trainer.losses` has too, and NumPy for the others.

Origin of the numbers: Keras 3.15.1, JAX backend. Run, where that is installed:
`KERAS_BACKEND=jax python tests/reference/make_losses.py`
"""

import json
import pathlib

import keras
import numpy as np

REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none")

random = np.random.default_rng(0)  # inputs that are added at the end leave all others as they are


def probabilities(*shape):
    values = random.uniform(0.05, 1.0, shape)
    return (values / values.sum(-1, keepdims=True)).round(4)


def numbers(*shape):
    return random.normal(0, 2, shape).round(4)


def unit_vectors(*shape):
    values = random.normal(size=shape)
    return (values / np.linalg.norm(values, axis=-1, keepdims=True)).round(4)


# Few different shapes, so that few operations have to be compiled.
ONE_HOT = np.eye(3)[[2, 0, 1, 1]]

INPUTS = {
    "features": (numbers(4, 3), numbers(4, 3)),
    "integers": (random.integers(-3, 4, (4, 3)), random.integers(-3, 4, (4, 3))),
    "column": (numbers(4), numbers(4, 1)),
    "column_of_labels": (numbers(4, 1), numbers(4)),
    "sequences": (numbers(2, 3, 4), numbers(2, 3, 4)),
    "zero_vectors": (np.diag([0.0, 1.0, 2.0, 0.0])[:, :3], numbers(4, 3) * [[1], [0], [1], [0]]),
    "large_errors": (np.zeros((4, 3)), np.outer([1e3, -1e3, 1e-3, 0.0], [1.0, 0.0, 0.1])),
    "counts": (random.integers(0, 5, (4, 3)), random.uniform(0, 4, (4, 3)).round(4)),
    "yes_or_no": (random.integers(0, 2, (4, 3)), random.uniform(0, 1, (4, 3)).round(4)),
    "certain": (ONE_HOT, np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])),
    "yes_or_no_logits": (random.integers(0, 2, (4, 3)), numbers(4, 3) * 10),
    "yes_or_no_maps": (random.integers(0, 2, (2, 3, 4)), random.uniform(0, 1, (2, 3, 4)).round(4)),
    "signs": (random.choice([-1, 1], (4, 3)), numbers(4, 3)),
    "distributions": (probabilities(4, 3), probabilities(4, 3)),
    "one_hot": (ONE_HOT, probabilities(4, 3)),
    "one_hot_unscaled": (ONE_HOT, random.uniform(0, 1, (4, 3)).round(4)),
    "one_hot_certain": (ONE_HOT, np.eye(3)[[2, 1, 1, 0]]),
    "one_hot_logits": (ONE_HOT, numbers(4, 3) * 5),
    "indices": (np.array([2, 0, 1, 1]), probabilities(4, 3)),
    "column_of_indices": (np.array([[2], [0], [1], [1]]), probabilities(4, 3)),
    "indices_logits": (np.array([2, 0, 1, 1]), numbers(4, 3) * 5),
    "pixels": (np.array([[0, 2, 1], [2, 3, 0]]), probabilities(2, 3, 4)),
    "void_pixels": (np.array([[0, -1, 1], [-1, 3, 0]]), probabilities(2, 3, 4)),
    "all_void_pixels": (np.full((2, 3), -1), probabilities(2, 3, 4)),
    "masks": (random.integers(0, 2, (4, 3, 2)), random.uniform(0, 1, (4, 3, 2)).round(4)),
    "empty_masks": (np.zeros((4, 3, 2)), np.zeros((4, 3, 2))),
    "moderate_logits": (random.integers(0, 2, (4, 3)), numbers(4, 3)),
    "one_hot_moderate_logits": (ONE_HOT, numbers(4, 3)),
    "sequences_of_labels": (np.array([[1, 2, 2], [3, 0, 0], [2, 3, 0], [1, 1, 0]]), numbers(4, 6, 4)),
    "embeddings": (np.array([0, 1, 0, 2]), unit_vectors(4, 3)),
    "embeddings_of_few_classes": (np.array([[1], [0], [1], [0]]), unit_vectors(4, 3)),
    "embeddings_of_one_class": (np.array([1, 1, 1, 1]), unit_vectors(4, 3)),
}

# By the shape of the values that they weigh.
WEIGHTS = {
    (4,): {"scalar": 2.5, "rows": [0.5, 2.0, 0.0, 1.5], "zeros": [0, 0, 0, 0]},
    (2, 3): {"scalar": 2.5, "column": [[0.5], [2.0]], "values": [[0.5, 2.0, 0.0], [1.0, 1.5, 3.0]]},
}

CLASSES = [
    *((name, {}, inputs) for name in ("MeanSquaredError", "MeanAbsoluteError", "LogCosh")
      for inputs in ("features", "integers", "column", "column_of_labels", "sequences", "large_errors")),
    *((name, {}, inputs) for name in ("MeanAbsolutePercentageError", "MeanSquaredLogarithmicError")
      for inputs in ("features", "column", "counts")),
    *(("Huber", config, inputs) for config in ({}, {"delta": 0.3}) for inputs in ("features", "sequences", "column")),
    *(("CosineSimilarity", {}, inputs) for inputs in ("features", "sequences", "zero_vectors")),
    ("CosineSimilarity", {"axis": 1}, "sequences"),
    *((name, {}, inputs) for name in ("Hinge", "SquaredHinge") for inputs in ("signs", "yes_or_no_logits")),
    ("CategoricalHinge", {}, "one_hot_logits"),
    ("Poisson", {}, "counts"),
    *(("KLDivergence", {}, inputs) for inputs in ("distributions", "one_hot", "one_hot_certain")),
    *(("BinaryCrossentropy", config, inputs) for config in ({}, {"label_smoothing": 0.2})
      for inputs in ("yes_or_no", "certain", "yes_or_no_maps")),
    ("BinaryCrossentropy", {"axis": 1}, "yes_or_no"),
    ("BinaryCrossentropy", {"from_logits": True}, "yes_or_no_logits"),
    ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, "yes_or_no_logits"),
    *(("CategoricalCrossentropy", config, inputs) for config in ({}, {"label_smoothing": 0.2})
      for inputs in ("one_hot", "one_hot_unscaled", "one_hot_certain")),
    ("CategoricalCrossentropy", {"from_logits": True}, "one_hot_logits"),
    ("CategoricalCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, "one_hot_logits"),
    ("CategoricalCrossentropy", {"from_logits": True, "axis": 1}, "sequences"),
    *(("SparseCategoricalCrossentropy", {}, inputs) for inputs in ("indices", "column_of_indices", "pixels")),
    ("SparseCategoricalCrossentropy", {"from_logits": True}, "indices_logits"),
    ("SparseCategoricalCrossentropy", {"ignore_class": 0}, "indices"),
    ("SparseCategoricalCrossentropy", {"ignore_class": -1}, "void_pixels"),
    ("SparseCategoricalCrossentropy", {"ignore_class": -1, "from_logits": True}, "void_pixels"),
    ("SparseCategoricalCrossentropy", {"ignore_class": -1}, "all_void_pixels"),
    *(("BinaryFocalCrossentropy", config, inputs)
      for config in ({}, {"apply_class_balancing": True, "alpha": 0.4, "gamma": 1.5}, {"label_smoothing": 0.2})
      for inputs in ("yes_or_no", "certain", "yes_or_no_maps")),
    ("BinaryFocalCrossentropy", {"gamma": 0.0, "axis": 1}, "yes_or_no"),
    ("BinaryFocalCrossentropy", {"from_logits": True}, "moderate_logits"),
    *(("CategoricalFocalCrossentropy", config, inputs)
      for config in ({}, {"alpha": [0.2, 0.5, 0.3], "gamma": 1.0}, {"label_smoothing": 0.2})
      for inputs in ("one_hot", "one_hot_unscaled", "one_hot_certain")),
    ("CategoricalFocalCrossentropy", {"from_logits": True}, "one_hot_moderate_logits"),
    *(("CategoricalGeneralizedCrossEntropy", {"q": q}, inputs) for q in (0.5, 0.9) for inputs in ("indices", "pixels")),
    ("CTC", {}, "sequences_of_labels"),
    *(("Circle", config, inputs) for config in ({}, {"gamma": 8.0, "margin": 0.25}, {"remove_diagonal": False})
      for inputs in ("embeddings", "embeddings_of_few_classes")),
    *((name, config, inputs) for name in ("Dice", "Tversky") for config in ({}, {"axis": (1, 2)}, {"axis": (2,)})
      for inputs in ("masks", "empty_masks")),
    ("Tversky", {"alpha": 0.7, "beta": 0.2}, "masks"),
]

# Losses that Keras lacks: functions, named as the trainer's, of labels, predictions and the configuration, which return
# a value per sample.
BY_HAND = {}


def class_of(name):
    """Returns Keras's class of a loss; for one in `BY_HAND` a class with its values, which Keras reduces."""
    if name not in BY_HAND:
        return getattr(keras.losses, name)
    assert not hasattr(keras.losses, name), f"Keras has {name}: take its numbers"

    class ByHand(keras.losses.Loss):
        def __init__(self, reduction, **config):
            super().__init__(reduction=reduction)
            self.config = config

        def call(self, y_true, y_pred):
            return BY_HAND[name](np.asarray(y_true), np.asarray(y_pred), **self.config)

    return ByHand


def cases():
    for name, config, inputs in CLASSES:
        loss_class = class_of(name)
        y_true, y_pred = INPUTS[inputs]
        values = np.asarray(loss_class(**config, reduction="none")(y_true, y_pred))
        for weight_name, weight in {"no": None, **WEIGHTS.get(values.shape, {})}.items():
            results = {
                reduction: np.asarray(loss_class(**config, reduction=reduction)(y_true, y_pred, weight)).tolist()
                for reduction in REDUCTIONS
            }
            yield {"loss": name, "config": config, "inputs": inputs, "weights": weight_name,
                   "sample_weight": weight, "results": results}


def functions():
    for name, config, inputs in CLASSES:
        y_true, y_pred = INPUTS[inputs]
        function = BY_HAND.get(name)
        function_name = function.__name__ if function else getattr(keras.losses, name)().fn.__name__
        if y_true.ndim != y_pred.ndim and not name.startswith(("Sparse", "CTC", "CategoricalGeneralized", "Circle")):
            continue  # Only some of Keras's functions match ranks; its classes all do.
        arguments = {"q": 0.5} | config if name.startswith("CategoricalGeneralized") else config
        function = function or getattr(keras.losses, function_name)
        value = function(y_true, y_pred.astype("float32"), **arguments)
        yield {"function": function_name, "arguments": arguments, "inputs": inputs,
               "result": np.asarray(value).tolist()}


if __name__ == "__main__":
    reference = {
        "origin": f"Keras {keras.__version__}, {keras.backend.backend().upper()} backend",
        "inputs": {name: {"y_true": y_true.tolist(), "y_pred": y_pred.tolist()}
                   for name, (y_true, y_pred) in INPUTS.items()},
        "classes": list(cases()),
        "functions": list(functions()),
    }
    lines = json.dumps(reference).replace('{"loss"', '\n{"loss"').replace('{"function"', '\n{"function"')
    pathlib.Path(__file__).with_name("losses.json").write_text(lines + "\n")
