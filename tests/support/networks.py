"""Small networks and data that several tests share."""

from __future__ import annotations

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

import trainer


class LinenMLP(nn.Module):
    """Two layers, and BatchNorm and dropout between them if asked for.

    BatchNorm's epsilon is large: with the usual epsilon, a batch of two rows magnifies rounding a thousandfold.
    """

    classes: int = 3
    batch_norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, training=False):
        x = nn.Dense(8)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not training, momentum=0.9, epsilon=0.1)(x)
        x = nn.Dropout(self.dropout, deterministic=not training)(nn.tanh(x))
        return nn.Dense(self.classes)(x)


class NNXMLP(nnx.Module):
    """The same network as NNX."""

    def __init__(self, features=6, classes=3, batch_norm=False, dropout=0.0, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(features, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, epsilon=0.1, rngs=rngs) if batch_norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(8, classes, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.last(self.dropout(nnx.tanh(x)))


def classification(rows, features=6, classes=3, seed=0):
    """Returns separable rows, their labels and positive weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    y = (x @ rng.normal(size=(features, classes))).argmax(-1)
    return x, y, rng.uniform(0.1, 2.0, size=rows).astype(np.float32)


def mirrored(replicas):
    """Returns a MirroredStrategy over so many simulated devices."""
    return trainer.distribute.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


def logits_loss(**options):
    """Returns the sparse crossentropy of logits."""
    return trainer.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def compiled_mlp(replicas=1, **options):
    """Returns a `LinenMLP` compiled with SGD for classification; `options` are those of `compile`."""
    with mirrored(replicas).scope():
        model = trainer.Model(LinenMLP())
        model.compile("sgd", logits_loss(), **options)
    return model


def custom_step(model):
    """Returns a train step `(state, (x, y)) -> (state, loss)` for `strategy.run`, with the default step's numbers."""
    def step(state, inputs):
        x, y = inputs

        def loss_fn(params):
            logits, model_state = model.apply(params, state, x, training=True)
            return model.compute_loss(x, y, logits, None), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, model_state=model_state), loss

    return step
