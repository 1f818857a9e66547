"""The call of a model: its module's outputs, compiled for each shape of inputs.

Owns when a call is compiled, when the module is called operation by operation instead, and when it may not be called;
and the table of the layers that are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from trainer.compile.jit import compiled
from trainer.core import replica_context
from trainer.core.replica_context import in_replica_context
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import REPLICATED, spec_text
from trainer.model.core.configuration import Configuration
from trainer.model.core.model_core import ModelCore
from trainer.modules import LayerRow, with_shardings, without_frozen


class _NotArrays(Exception):
    """A module returned something else than arrays, which compiled code cannot."""


def outputs_of(
    apply: Callable[..., Any], configuration: Configuration, state: TrainState, x: PyTree, training: bool,
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
    # A call in a step or in a function of `strategy.run` is a part of it: what is compiled there serves no other.
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


def _arrays(outputs: PyTree) -> Any:
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(outputs)):
        raise _NotArrays
    return outputs


def trained_names(core: ModelCore) -> set[str]:
    """Returns the names of the parameters that are trained.

    Raises:
      RuntimeError: if the model is not built.
    """
    state = core.state.current
    trained = state.params if state.optimizer is None else state.trainable(state.params)
    return set(named_leaves(trained)) if core.configuration.trainable else set()


def table_of_layers(core: ModelCore, name: str) -> tuple[list[LayerRow], str, int, int, int]:
    """Returns what `render_summary` is given for a model: its layers, its name, and how many numbers it holds.

    Raises:
      RuntimeError: if the model is not built.
    """
    holder, trained = core.state, trained_names(core)
    state = holder.current
    params = named_leaves(state.params)
    frozen = {name: leaf.size for name, leaf in params.items() if name not in trained}
    total, others = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, state.model_state))
    with replica_context.enter(replica_context.context_outside(holder.inputs)):
        rows = without_frozen(core.module.summary_rows(holder.inputs), frozen)
    split = {name: spec for name, leaf in params.items()
             if (spec := spec_text(leaf.sharding, leaf.shape)) != REPLICATED}
    return with_shardings(rows, split), name, total + others, total - sum(frozen.values()), others
