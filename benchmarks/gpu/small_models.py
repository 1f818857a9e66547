"""Small models and data for checks: convolutions with BatchNorm, a transformer with an embedding, an MLP."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
from flax import linen as nn

import trainer
from trainer import models


class ConvNet(nn.Module):
    """A convolution, BatchNorm, max pooling and two dense layers, whose sums may change their order on GPUs."""

    @nn.compact
    def __call__(self, x, training=False):
        x = nn.BatchNorm(use_running_average=not training)(nn.Conv(8, (3, 3))(x))
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2)).reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(32, name="hidden")(x)))


class MLP(nn.Module):
    """8-8-3."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(8, name="hidden")(x)))


NAMES = ("mlp", "convnet", "lm")


def new_model(name: str, **options: Any) -> trainer.Model:
    """Returns a compiled model; `options` are those of `compile`."""
    module = {"mlp": MLP, "convnet": ConvNet,
              "lm": lambda: models.TransformerLM(64, num_layers=2, d_model=32, num_heads=2, max_len=16)}[name]()
    model = trainer.Model(module, seed=0)
    model.compile(optax.sgd(0.05, momentum=0.9), trainer.losses.SparseCategoricalCrossentropy(from_logits=True),
                  **options)
    return model


def data(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels that can be learned."""
    rng = np.random.default_rng(0)
    if name == "lm":
        tokens = (rng.integers(0, 64, (rows, 1)) + np.arange(17)) % 64
        return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    shape, classes = ((8,), 3) if name == "mlp" else ((8, 8, 3), 10)
    x = rng.standard_normal((rows, *shape), np.float32)
    weights = rng.standard_normal((int(np.prod(shape)), classes), np.float32)
    return x, (x.reshape(rows, -1) @ weights).argmax(-1).astype(np.int32)
