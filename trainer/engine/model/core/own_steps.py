"""Mistakes in the user's own steps and losses, found before anything compiles.

Owns the checks of overridden steps and losses, before and after their trace, and the advice in errors of their
code.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trainer.core import replica_context
from trainer.core.calls.tracebacks import user_stacklevel
from trainer.core.compile.program_digest import program_digest
from trainer.core.errors import see
from trainer.core.train_state import TrainState
from trainer.core.types import PyTree
from trainer.data import pack_x_y_sample_weight, unpack_x_y_sample_weight
from trainer.data.sources.arrays import Batch
from trainer.engine.step import steps
from trainer.engine.step.crossed_rows import crosses_rows

_RETURNED = {"train": "(logs, state)", "test": "logs", "predict": "outputs"}


def check_signature(step: Callable[..., Any], kind: str) -> None:
    """Raises TypeError for a step with other arguments, such as Keras's `train_step(self, data)`."""
    signature = inspect.signature(step)
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"`{kind}_step(self, state, batch)` must take a state and a batch, and return {_RETURNED[kind]}. Received: "
            f"{kind}_step{signature}. `trainer.unpack_x_y_sample_weight(batch)` gives x, y and weights.") from None


def explain_value(error: Exception) -> None:
    """Puts advice before the message of JAX's error about code that asks for the value of an array."""
    error.args = (
        "The step asks for the value of an array, which has none while the step is traced. Print with "
        '`jax.debug.print("{}", loss)`, compute with `jnp` in place of `np`, `float` and `if`, or compile with '
        f"run_eagerly=True to look. {see('traced-value')} JAX says: {error}", *error.args[1:])


def explain_gradient(error: Exception) -> None:
    """Adds a note to JAX's errors about a loss with further results, and to PyTorch's way to a gradient."""
    text = str(error)
    if "Gradient only defined for scalar-output functions. Output was (" in text:
        error.add_note("A loss that returns `(loss, others)` needs `jax.value_and_grad(loss, has_aux=True)`, which "
                       "returns `((loss, others), gradients)`.")
    elif "has no attribute backward" in text:
        error.add_note("JAX differentiates functions: `loss, grads = jax.value_and_grad(loss_of)(state.params)`, then "
                       "`state.apply_gradients(grads)`.")


def check_penalties(has_regularizers: bool, sows_losses: bool) -> None:
    """Raises or warns if a `train_step` that never calls `compute_penalties` leaves out parts of the loss.

    Args:
      has_regularizers: whether `compile` was given `regularizers`.
      sows_losses: whether the module sows into "losses".

    Raises:
      ValueError: if there are regularizers.
    """
    fix = ("The overridden `train_step` does not call `compute_penalties`: add `self.compute_penalties(params, "
           "model_state)` to its loss, with the parameters to differentiate by and the state that `self.apply` "
           "returned")
    if has_regularizers:
        raise ValueError(f"`compile` was given `regularizers`, which the training would leave out. {fix}.")
    if sows_losses:
        warnings.warn(f"The module sows into 'losses', which the training may leave out. {fix}, unless it adds "
                      "what `model_state['losses']` holds.", stacklevel=user_stacklevel())


def warn_of_inference(apply: Callable[..., Any], state: TrainState, batch: Batch) -> None:
    """Warns of a `train_step` that never says if it trains, where the module differs in training.

    Args:
      apply: the model's `apply`.
      state: the state, or its shapes.
      batch: the first batch.
    """
    x = unpack_x_y_sample_weight(batch)[0]

    def digest(training: bool) -> str:
        return program_digest(lambda state, x: apply(state.params, state, x, training=training), state, x)

    with contextlib.suppress(Exception):  # only the step knows the inputs of its modules
        in_training, in_inference = digest(True), digest(False)
        if in_training != in_inference:
            warnings.warn("The overridden `train_step` calls `self.apply` without `training`: dropout is inactive, "
                          "and BatchNorm uses its running averages. Write `self.apply(params, state, x, "
                          "training=True)`, or `training=False` if it is meant.", stacklevel=user_stacklevel())


def warn_of_crossed_rows(
    method: str, train_step: steps.Step, outputs: Callable[[TrainState, Batch], Any], state: TrainState, batch: Batch
) -> None:
    """Warns of a loss of labels `(rows,)` and outputs `(rows, 1)` that compares all rows with all.

    Args:
      method: the user's own method, which has the loss.
      train_step: the step.
      outputs: the model's outputs of a state and a batch.
      state: the state, or its shapes.
      batch: the first batch.
    """
    x, y, sample_weight = unpack_x_y_sample_weight(batch)

    def step(state: TrainState, y: PyTree) -> Any:
        return steps.train_one_batch(
            train_step, replica_context.single_context, state, pack_x_y_sample_weight(x, y, sample_weight))

    is_flat = [np.ndim(leaf) == 1 for leaf in jax.tree.leaves(y)]
    with contextlib.suppress(Exception):  # only the step knows the inputs of its modules
        shapes = jax.eval_shape(outputs, state, batch) if any(is_flat) else None
        if any(leaf.ndim == 2 and leaf.shape[1] == 1 for leaf in jax.tree.leaves(shapes)) and crosses_rows(
                jax.make_jaxpr(step)(state, y), [False] * len(jax.tree.leaves(state)) + is_flat):
            warnings.warn(f"`{method}` combines labels of shape (rows,) with outputs of shape (rows, 1), which "
                          "NumPy's rules make (rows, rows): each output meets the labels of all rows. Write "
                          "`y_pred[:, 0]`, or give labels of shape (rows, 1).", stacklevel=user_stacklevel())
