"""The call of a model: its module's outputs, compiled for each shape of inputs.

Owns when a call is compiled, when the module is called operation by operation instead, and when it may not be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from trainer.compile.jit import compiled
from trainer.core import trace_purity
from trainer.core.replica_context import in_replica_context
from trainer.core.train_state import TrainState
from trainer.model.configuration import Configuration


def check_is_outside_of_steps(model: Any) -> None:
    """Raises TypeError while a step is traced, of which the state of a model would be a constant.

    Args:
      model: the model that is called.
    """
    trace_purity.check_may_read(
        model, "the state of a model that it calls", "In a step of the model, call `self.apply(params, state, x, "
        "training=...)[0]`; `compute_loss` is given these outputs as `y_pred`. Call another model, whose weights are "
        "constants there, by `teacher.apply(teacher.state.params, teacher.state, x)[0]`. Pass `model.state` as an "
        "argument of `run`, and use `model.apply` in its function.")


class _NotArrays(Exception):
    """A module returned something else than arrays, which compiled code cannot."""


def outputs_of(
    apply: Callable[..., Any], configuration: Configuration, state: TrainState, x: Any, training: bool,
    may_compile: bool,
) -> Any:
    """Returns the module's outputs for inputs.

    Args:
      apply: the model's method.
      configuration: holds the compiled calls.
      state: where weights, model state and random streams are taken from; an argument of compiled code.
      x: the inputs.
      training: as in `apply`.
      may_compile: whether `apply` is the trainer's own, of which all that may change is an argument, and `x` is not
        being traced.
    """
    # A call in a step is a part of it: what is compiled there may ask the other replicas, and serves no other call.
    if not may_compile or configuration.options.eager or in_replica_context():
        return apply(state.params, state, x, training=training)[0]
    if training not in configuration.forwards:
        configuration.forwards[training] = compiled(lambda state, x: _arrays(
            apply(state.params, state, x, training=training)[0]))
    forward = configuration.forwards[training]
    if forward is not None:
        try:
            return forward(state.replace(opt_state=None, optimizer=None), x)  # all else would cost time in each call
        except _NotArrays:
            configuration.forwards[training] = None
    return apply(state.params, state, x, training=training)[0]


def _arrays(outputs: Any) -> Any:
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(outputs)):
        raise _NotArrays
    return outputs
