"""Optimizers that TensorFlow's estimators know by name: this project's, of the same names, take the same steps."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer import optimizers

CASES = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "feature_columns.json").read_text(
    encoding="utf-8"))["optimizers"]

# TensorFlow's older optimizers add epsilon beside the root, and Keras's RMSprop below it, which small gradients show.
TOLERANCES = {"Adam": 2e-5, "RMSprop": 2e-3}


@jax.jit
def gradient(weights):
    return (weights - jnp.array([1.0, -1.0, 0.25, 0.0])) * jnp.array([1.0, 0.1, 3.0, 0.01])


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case['name']} at {case['learning_rate'] or 'its default'}") for case in CASES])
def test_twenty_steps_are_tensorflows(case):
    optimizer = optimizers.get(case["name"])
    if case["learning_rate"]:
        optimizer.learning_rate = case["learning_rate"]
    weights = jnp.array([0.0, 0.5, -0.75, 2.0])
    state = optimizer.init(weights)
    for expected in case["weights"]:
        updates, state = optimizer.update(gradient(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=TOLERANCES.get(case["name"], 2e-6))
