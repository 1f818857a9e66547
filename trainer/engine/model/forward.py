"""The call of a model, compiled for each shape of inputs.

Owns whether a call is compiled, runs operation by operation, or is forbidden; and the table of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from trainer.core import replica_context
from trainer.core.compile.jit import compiled
from trainer.core.modules import LayerRow, with_shardings, without_frozen
from trainer.core.replica_context import in_replica_context
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves
from trainer.core.types import PyTree
from trainer.distribute.placement.placement import REPLICATED, spec_text
from trainer.engine.model.core.configuration import Configuration
from trainer.engine.model.core.model_core import ModelCore


class _NotArrays(Exception):
    """A module returned values other than arrays, which compiled code cannot return."""


def outputs_of(
    apply: Callable[..., Any], configuration: Configuration, state: TrainState, x: PyTree, training: bool,
    may_compile: bool,
) -> Any:
    """Returns the module's outputs for inputs.

    Args:
      apply: the model's method.
      configuration: holds the compiled calls.
      state: provides weights, model state and random streams; an argument of compiled code.
      x: the inputs.
      training: as in `apply`.
      may_compile: whether `apply` is not overridden, so that it depends on its arguments only, and `x` is not being
        traced.
    """
    # Inside a step or a function of `strategy.run`, the call is traced as a part of it.
    if not may_compile or configuration.options.eager or in_replica_context():
        return apply(state.params, state, x, training=training)[0]
    if training not in configuration.forwards:
        configuration.forwards[training] = compiled(lambda state, x: _arrays(
            apply(state.params, state, x, training=training)[0]))
    forward = configuration.forwards[training]
    if forward is not None:
        try:
            return forward(state.replace(opt_state=None, optimizer=None), x)  # other fields cost time per call
        except _NotArrays:
            configuration.forwards[training] = None
    return apply(state.params, state, x, training=training)[0]


def _arrays(outputs: PyTree) -> Any:
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(outputs)):
        raise _NotArrays
    return outputs


def trained_names(core: ModelCore) -> set[str]:
    """Returns the names of the trained parameters; raises RuntimeError if the model is not built."""
    state = core.state.current
    trained = state.params if state.optimizer is None else state.trainable(state.params)
    return set(named_leaves(trained)) if core.configuration.trainable else set()


def table_of_layers(core: ModelCore, name: str) -> tuple[list[LayerRow], str, int, int, int]:
    """Returns the arguments of `render_summary` for a model: its layers, its name and the sizes of its weights.

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
