"""Small estimators, their data, and loops written by hand that compute the expected numbers."""

from __future__ import annotations

import numpy as np
from flax import linen as nn

import trainer
from trainer import estimator as est

X = np.array([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5], [4.0, 4.5], [0.5, -1.0]], np.float32)
Y = np.array([[0.3], [0.5], [0.7], [0.8], [-0.2]], np.float32)
RATE = 0.05


def dataset(batch_size=2, repeat=False):
    made = trainer.data.Dataset.from_arrays((X, Y)).batch(batch_size)
    return made.repeat() if repeat else made


def spec_fn(module=None, **options):
    """Returns a `model_fn` of a linear model that begins with zeros, or of another module."""
    module = module or nn.Dense(1, kernel_init=nn.initializers.zeros_init())

    def model_fn(features, labels, mode):
        return est.EstimatorSpec(mode, **{
            "module": module, "loss": "mse", "optimizer": trainer.optimizers.SGD(RATE), **options})

    return model_fn


def trained_by_hand(groups):
    """Returns kernel and bias after a step of gradient descent on each group of rows."""
    kernel, bias = np.zeros((2, 1)), np.zeros(1)
    for rows in groups:
        errors = X[rows] @ kernel + bias - Y[rows]
        kernel, bias = kernel - RATE * 2 * X[rows].T @ errors / len(rows), bias - RATE * 2 * errors.mean(0)
    return kernel, bias


def variables(made):
    """Returns the weights and the state of the module in the newest checkpoint, by name."""
    return {name: made.get_variable_value(name) for name in made.get_variable_names()
            if name.startswith(("params/", "model_state/"))}


class StopWithError(est.SessionRunHook):
    """Interrupts a training after so many steps."""

    def __init__(self, steps):
        self._left = steps

    def after_run(self, run_context, run_values):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
