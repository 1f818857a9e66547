"""Models of `keras.applications` whose weights show errors, and their distances from models of ours.

Random deep networks give every image the same answer, whatever is wrong in them. So statistics of BatchNorm are taken
from data and then perturbed, and the classifier is scaled until images differ. Without any normalization, kernels are
drawn so that ReLUs keep the size of their inputs.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import trainer
from trainer import models

ROWS = 4

Size = int | tuple[int, int]


def sides(size: Size) -> tuple[int, int]:
    """Returns height and width, of which one number is both."""
    return (size, size) if isinstance(size, int) else size


def images(size: Size, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    """Returns smooth images with values from -1 to 1, which differ from each other."""
    x = np.random.default_rng(seed).uniform(-1, 1, (rows, 6, 6, 3))
    for side in sides(size):  # along one axis, which then changes places with the other axis
        positions = np.linspace(0, 5, side)
        low = np.floor(positions).astype(int).clip(0, 4)
        part = (positions - low)[:, None, None]
        x = (x[:, low] * (1 - part) + x[:, low + 1] * part).transpose(0, 2, 1, 3)
    return x.astype(np.float32)


def settled(keras, model, data: np.ndarray, seed: int = 0):
    """Gives a Keras model statistics of data, perturbed weights, and answers that differ between images; returns it."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        # Before all that depends on it is measured; without weights it has constants, as ConvNeXt's.
        if isinstance(layer, keras.layers.Normalization) and layer.get_weights():
            mean, variance, *count = layer.get_weights()
            layer.set_weights([rng.uniform(0.4, 0.5, mean.shape), rng.uniform(0.1, 0.3, variance.shape), *count])
            layer.finalize_state()  # it computes with copies
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
        elif arrays and not isinstance(layer, keras.layers.Normalization):
            layer.set_weights([each * rng.uniform(0.9, 1.1, each.shape) if each.ndim > 1
                               else each + rng.uniform(-0.05, 0.05, each.shape) for each in arrays])
    return model


def scaled_head(keras, model, data: np.ndarray):
    """Gives the classifier logits that differ by about 0.7 between images, and are 0 in the mean; returns the model."""
    head = next(layer for layer in reversed(model.layers) if layer.get_weights())
    kernel, bias = head.get_weights()
    logits = np.asarray(keras.Model(model.inputs, head.input).predict(data, verbose=0)) @ kernel
    scale = 0.7 / logits.std(0).mean()
    head.set_weights([scale * kernel, -scale * logits.mean(0).reshape(bias.shape)])
    return model


def twin(keras_model, ours, size: Size, path) -> trainer.Model:
    """Returns our module as a model with the weights of a Keras model, by way of a file."""
    keras_model.save_weights(path)
    model = trainer.Model(ours)
    model.build(np.zeros((1, *sides(size), 3), np.float32))
    models.load_keras_weights(model, path)
    return model


def difference(keras_model, model: trainer.Model, data: np.ndarray) -> float:
    """Returns the largest difference between the outputs for images."""
    expected = np.asarray(keras_model.predict(data, verbose=0))
    received = model.predict(data, verbose=0)
    assert received.shape == expected.shape, (received.shape, expected.shape)
    return float(np.abs(received - expected).max())


def outline(keras, name: str, **options) -> tuple[dict[str, list[tuple]], int]:
    """Returns the layers of a model of `keras.applications` by kind, in its order, and how many values it has.

    A layer is its name and its arguments. No arrays are made.
    """
    with keras.StatelessScope(initialize_variables=False):
        model = getattr(keras.applications, name)(weights=None, **options)
    layers = collections.defaultdict(list)
    for layer in model.layers:
        if isinstance(layer, keras.layers.DepthwiseConv2D | keras.layers.Conv2D):
            kind = "depthwise" if isinstance(layer, keras.layers.DepthwiseConv2D) else "conv"
            layers[kind].append((layer.name, layer.kernel_size, layer.strides, layer.output.shape[-1], layer.use_bias))
        elif isinstance(layer, keras.layers.BatchNormalization):
            layers["batch_norm"].append((layer.name, layer.momentum, layer.epsilon, layer.scale))
        elif isinstance(layer, keras.layers.Dense):
            layers["dense"].append((layer.name, layer.units))
        elif isinstance(layer, keras.layers.Dropout):
            axes = tuple(axis for axis, size in enumerate(layer.noise_shape or ()) if size == 1)
            layers["dropout"].append((round(layer.rate, 6), axes))
    return dict(layers), model.count_params()


def own_outline(module: nn.Module, size: Size = 96) -> tuple[dict[str, list[tuple]], int]:
    """Returns the same of a model of ours, where the order is that of calls."""
    layers = collections.defaultdict(list)

    def note(next_call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        layer, name = context.module, "_".join(context.module.path)
        if isinstance(layer, nn.Conv):
            kind = "depthwise" if layer.feature_group_count == layer.features else "conv"
            layers[kind].append((name, layer.kernel_size, layer.strides, layer.features, layer.use_bias))
        elif isinstance(layer, nn.BatchNorm):
            layers["batch_norm"].append((name, layer.momentum, layer.epsilon, layer.use_scale))
        elif isinstance(layer, nn.Dense):
            layers["dense"].append((name, layer.features))
        elif isinstance(layer, nn.Dropout) and layer.rate:
            layers["dropout"].append((round(layer.rate, 6), tuple(layer.broadcast_dims)))
        return next_call(*args, **kwargs)

    with nn.intercept_methods(note):
        variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *sides(size), 3)))
    return dict(layers), sum(leaf.size for leaf in jax.tree.leaves(variables))
