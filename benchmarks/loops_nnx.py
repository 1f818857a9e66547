"""The loop of Flax's own guide for NNX: `nnx.jit`, `nnx.value_and_grad`, `nnx.Optimizer` and `nnx.MultiMetric`."""

from __future__ import annotations

from collections.abc import Callable

import optax
from cases import Workload
from flax import nnx
from loops_hand import orders

import models


def fit(workload: Workload) -> Callable[[int], int]:
    """Gathers each batch with numpy, and calls the step of the guide with it."""
    x, y = workload.data()
    model = models.new_nnx(workload)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, x, y):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, x, y):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)

    def run(epochs):
        for order in orders(workload, epochs):
            for rows in order:
                train_step(model, optimizer, metrics, x[rows], y[rows])
            {name: float(value) for name, value in metrics.compute().items()}
            metrics.reset()
        return epochs * workload.steps

    return run
