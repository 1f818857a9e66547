"""Models of `keras.applications` whose weights show errors, and how far a model of ours is from one.

Random deep networks give every image the same answer, whatever is wrong in them. So statistics of BatchNorm are taken
from data and then perturbed, and the classifier is scaled until images differ. Without any normalization, kernels are
drawn so that ReLUs keep the size of what goes through them.
"""

from __future__ import annotations

import numpy as np

import trainer
from trainer import models

ROWS = 4


def images(size: int, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    """Returns smooth images with values from -1 to 1, which differ from each other."""
    coarse = np.random.default_rng(seed).uniform(-1, 1, (rows, 6, 6, 3))
    positions = np.linspace(0, 5, size)
    low = np.floor(positions).astype(int).clip(0, 4)
    part = (positions - low)[:, None]
    across = coarse[:, low] * (1 - part)[..., None] + coarse[:, low + 1] * part[..., None]
    across = across.transpose(0, 2, 1, 3)
    whole = across[:, low] * (1 - part)[..., None] + across[:, low + 1] * part[..., None]
    return whole.transpose(0, 2, 1, 3).astype(np.float32)


def settled(keras, model, data: np.ndarray, seed: int = 0):
    """Gives a Keras model statistics of data, perturbed weights, and answers that differ between images; returns it."""
    rng = np.random.default_rng(seed)
    normalizing = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    normalizes = any("Normalization" in type(layer).__name__ for layer in model.layers)
    momenta = [layer.momentum for layer in normalizing]
    for layer in normalizing:
        layer.momentum = 0.0
    for _ in range(2):
        model(data, training=True)
    for layer, momentum in zip(normalizing, momenta, strict=True):
        layer.momentum = momentum
    for layer in model.layers:
        arrays = layer.get_weights()
        if isinstance(layer, keras.layers.BatchNormalization):
            *scale, bias, mean, variance = arrays
            layer.set_weights([
                *(each * rng.uniform(0.9, 1.1, each.shape) for each in scale),
                bias + rng.uniform(-0.1, 0.1, bias.shape),
                mean + 0.1 * np.sqrt(variance) * rng.uniform(-1, 1, mean.shape),
                (variance + 1e-3) * rng.uniform(0.8, 1.2, variance.shape)])
        elif arrays and not normalizes:
            kernel, bias = arrays
            deviation = np.sqrt(2 / np.prod(kernel.shape[:-1]))
            layer.set_weights([rng.normal(0, deviation, kernel.shape), bias + rng.uniform(-0.05, 0.05, bias.shape)])
        elif arrays:
            layer.set_weights([each * rng.uniform(0.9, 1.1, each.shape) if each.ndim > 1
                               else each + rng.uniform(-0.05, 0.05, each.shape) for each in arrays])
    return model


def scaled_head(keras, model, data: np.ndarray):
    """Gives the last layer logits that differ by about 0.7 between images, and are 0 in the mean; returns the model."""
    head = model.layers[-1]
    kernel, _ = head.get_weights()
    logits = np.asarray(keras.Model(model.inputs, head.input).predict(data, verbose=0)) @ kernel
    scale = 0.7 / logits.std(0).mean()
    head.set_weights([scale * kernel, -scale * logits.mean(0)])
