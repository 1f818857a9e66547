"""Labels, predictions and weights on which losses and metrics are compared with Keras.

Each kind of inputs is a function of a random generator and a number of rows. Numbers are rounded, so that they print
well, and some are at the edges of the range of a loss or a metric: 0, 1, equal to a threshold, large.
"""

from __future__ import annotations

import numpy as np

CLASSES = 3
STEPS = 2

EDGES = {
    "number": (0.0, 1.0, -1.0, 1e4, -1e4, 1e-9),
    "probability": (0.0, 1.0, 0.5, 1e-9, 1 - 1e-6),
}


def _with_edges(random, values, edges, share=0.15):
    return np.where(random.random(values.shape) < share, random.choice(EDGES[edges], values.shape), values)


def numbers(random, *shape):
    return _with_edges(random, random.normal(0, 2, shape).round(3), "number")


def moderate(random, *shape):
    return random.normal(0, 2, shape).round(3)


def shares(random, *shape):
    return _with_edges(random, random.random(shape).round(3), "probability")


def distributions(random, *shape):
    values = random.uniform(0.01, 1, shape)
    certain = random.random((*shape[:-1], 1)) < 0.2
    values = np.where(certain, np.eye(shape[-1])[random.integers(0, shape[-1], shape[:-1])], values)
    return (values / values.sum(-1, keepdims=True)).round(4)


def one_hot(random, *shape):
    return np.eye(CLASSES)[random.integers(0, CLASSES, shape)]


def indices(random, *shape):
    return random.integers(0, CLASSES, shape)


def bits(random, *shape):
    return random.integers(0, 2, shape)


def unit_vectors(random, *shape):
    vectors = random.normal(size=shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


INPUTS = {
    "numbers": lambda r, n: (numbers(r, n, 3), numbers(r, n, 3)),
    "moderate": lambda r, n: (moderate(r, n, 3), moderate(r, n, 3)),
    "column": lambda r, n: (numbers(r, n), numbers(r, n, 1)),
    "sequences of numbers": lambda r, n: (numbers(r, n, STEPS, 3), numbers(r, n, STEPS, 3)),
    "moderate sequences": lambda r, n: (moderate(r, n, 4, 3), moderate(r, n, 4, 3)),
    "positive numbers": lambda r, n: (abs(moderate(r, n, 3)), abs(moderate(r, n, 3))),
    "counts": lambda r, n: (r.integers(0, 5, (n, 3)), abs(moderate(r, n, 3))),
    "signs": lambda r, n: (r.choice([-1, 1], (n, 3)), numbers(r, n, 3)),
    "bits and numbers": lambda r, n: (bits(r, n, 3), numbers(r, n, 3)),
    "bits and moderate numbers": lambda r, n: (bits(r, n, 3), moderate(r, n, 3)),
    "bits": lambda r, n: (bits(r, n, 3), shares(r, n, 3)),
    "bit column": lambda r, n: (bits(r, n), shares(r, n, 1)),
    "bit per row": lambda r, n: (bits(r, n), shares(r, n)),
    "tenths": lambda r, n: (bits(r, n), r.integers(0, 11, n) / 10),
    "shares": lambda r, n: (shares(r, n, 3), shares(r, n, 3)),
    "distributions": lambda r, n: (distributions(r, n, 3), distributions(r, n, 3)),
    "one-hot": lambda r, n: (one_hot(r, n), distributions(r, n, 3)),
    "one-hot and logits": lambda r, n: (one_hot(r, n), moderate(r, n, 3)),
    "one-hot sequences": lambda r, n: (one_hot(r, n, STEPS), distributions(r, n, STEPS, 3)),
    "one-hot, classes second": lambda r, n: (np.moveaxis(one_hot(r, n, 3), -1, 1), distributions(r, n, 3, 3)),
    "indices": lambda r, n: (indices(r, n), distributions(r, n, 3)),
    "index column": lambda r, n: (indices(r, n, 1), distributions(r, n, 3)),
    "indices and logits": lambda r, n: (indices(r, n), moderate(r, n, 3)),
    "index sequences": lambda r, n: (indices(r, n, STEPS), distributions(r, n, STEPS, 3)),
    "indices, one step": lambda r, n: (indices(r, n, 1), distributions(r, n, 1, 3)),
    "indices, classes second": lambda r, n: (indices(r, n, STEPS), np.moveaxis(distributions(r, n, STEPS, 3), -1, 1)),
    "class pairs": lambda r, n: (indices(r, n), indices(r, n)),
    "class pairs of sequences": lambda r, n: (indices(r, n, STEPS), indices(r, n, STEPS)),
    "ranked": lambda r, n: (indices(r, n), np.argsort(-r.random((n, 3)), axis=-1)),
    "masks": lambda r, n: (bits(r, n, 2, 2, 1), shares(r, n, 2, 2, 1)),
    "embeddings": lambda r, n: (indices(r, n), unit_vectors(r, n, 4)),
    "label sequences": lambda r, n: (r.integers(1, 4, (n, 2)), moderate(r, n, 6, 5)),
    "values": lambda r, n: (numbers(r, n),),
    "value table": lambda r, n: (numbers(r, n, 3),),
}

# Weights of each shape, for values of losses of shape `values`; all but None are drawn per batch.
WEIGHTS = {
    "none": lambda r, values: None,
    "scalar": lambda r, values: 0.5,
    "rows": lambda r, values: r.uniform(0, 2, values[:1]).round(3),
    "column": lambda r, values: r.uniform(0, 2, (*values[:1], 1)).round(3),
    "values": lambda r, values: r.uniform(0, 2, values).round(3),
    "zeros": lambda r, values: np.zeros(values[:1]),
    "some zeros": lambda r, values: bits(r, *values[:1]).astype(float),
    "whole numbers": lambda r, values: r.integers(0, 3, values[:1]),
    "negative": lambda r, values: r.uniform(-2, 2, values[:1]).round(3),
}
