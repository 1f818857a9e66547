"""Whether model state that a module keeps is one device's after a step of several replicas, tried on a few rows.

It becomes the mean over replicas, weighted by rows, or what is declared; see `distribute/replica/state_reduction.py`.
How rows are computed by several replicas is in `replica_checks.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.compile.dependence import dependent_results
from trainer.core import replica_context
from trainer.core.replica_context import ReduceOp, ReplicaContext
from trainer.core.train_state import TrainState
from trainer.core.tree_paths import named_leaves, restricted
from trainer.core.types import PyTree
from trainer.distribute.replica import state_reduction
from trainer.step.output_checks import LEAVE_OUT_PADDING_IN_MODULE
from trainer.step.replica_checks import PADS, Recording, compared, compared_when_padded, is_close

Apply = Callable[[TrainState, Any], Any]
IsExempt = Callable[[str], bool]


class _Agreeing(ReplicaContext):
    """A replica for which the result of a reduction over all replicas does not depend on its own rows, being equal."""

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree, options: Any = None) -> Any:
        return jax.tree.map(jnp.zeros_like, value)

    def all_gather(self, value: PyTree, axis: int = 0) -> Any:
        return jax.tree.map(jnp.zeros_like, value)


def check_state_reduction(apply: Apply, state: TrainState, batch: Any, replicas: int, is_exempt: IsExempt) -> None:
    """Raises ValueError if replicas' model state has no sound rule by which it becomes that of one device.

    A declared "sum" is compared too: what decays, such as a moving average of counts, is none. The other declarations
    are what the user wants of values that differ.

    Args:
      apply: returns the model state after a call in training, from the state and a batch.
      state: the state.
      batch: what `replica_checks.some_rows` returned.
      replicas: how many replicas there are.
      is_exempt: whether the array of a path needs no check.
    """
    rule = functools.partial(state_reduction.declared, state.state_reduction)
    alone, several, is_random = compared(functools.partial(_outcome, apply, is_exempt), state, batch, replicas)
    differs: dict[str, bool] = {}
    for key, value in alone.items():
        path = key.partition(":")[2]
        if rule(path) not in (None, "sum"):
            continue
        if is_random:  # what replicas must agree in, they must agree in nevertheless
            if np.issubdtype(value.dtype, np.inexact):
                continue
            value = several[key][0]
        differs[path] = differs.get(path, False) or not all(is_close(value, each, 1e-3) for each in several[key])
    no_sums = sorted(path for path, value in differs.items() if value and rule(path) == "sum")
    if no_sums:
        raise ValueError(
            f"`state_reduction` declares {', '.join(map(repr, no_sums))} to be a \"sum\", but what replicas add to it "
            f"is not what one device adds: a value that decays, for example, is none. {state_reduction.REDUCE_INSIDE}")
    state_reduction.refuse_differences(differs)
    counts = [path for path in _counts_of_rows(apply, state, batch) if rule(path) is None and not is_exempt(path)]
    if counts:  # which may be equal for these rows, and not for others
        raise state_reduction.no_rule(counts, "depends on the values of rows, of which each replica has its own")


def check_padded_state(
    apply: Apply, state: TrainState | None, batch: Any, replicas: int, is_exempt: IsExempt
) -> None:
    """Raises ValueError if model state depends on rows that only pad a batch.

    Args:
      apply: see `check_state_reduction`; so are the others.
      state: see `apply`; None if it is not at hand.
      batch: see `apply`.
      replicas: see `apply`.
      is_exempt: see `apply`.
    """
    if state is None or jax.tree.leaves(batch)[0].shape[0] < 2:
        return
    rule = functools.partial(state_reduction.declared, state.state_reduction)
    outcome = functools.partial(_outcome, apply, is_exempt)
    alone, one, other, is_random = compared_when_padded(outcome, state, batch, replicas)

    def counts_padding(key: str) -> bool:
        is_known = rule(key.partition(":")[2]) in (None, "sum") and not is_random
        return not is_close(one[key], other[key], 1e-5) or (is_known and not is_close(alone[key], one[key], 1e-3))

    names = sorted({key.partition(":")[2] for key in one if counts_padding(key)})
    if names:
        raise ValueError(f"The model state {', '.join(map(repr, names))} counts rows that {PADS}. "
                         f"{LEAVE_OUT_PADDING_IN_MODULE}")


def _outcome(
    apply: Apply, is_exempt: IsExempt, state: TrainState, context: Recording, batch: Any
) -> dict[str, Any]:
    """Returns the state that replicas have agreed on after each of two steps, by the step and the path."""
    found: dict[str, Any] = {}
    for step in (1, 2):  # in the first, what decays is often zero
        after = restricted(apply(state, batch), state.model_state)
        old = named_leaves(state.model_state)
        changed = [path for path, new in named_leaves(after).items() if new is not old[path]]
        is_random = context.is_random
        merged = state_reduction.over_replicas(state.model_state, after, state.state_reduction, context)
        context.is_random = is_random  # whatever the reduction has asked for
        state = state.replace(model_state=merged)
        found |= {f"{step}:{path}": value for path, value in named_leaves(merged).items()
                  if path in changed and not is_exempt(path)}
    return found


def _counts_of_rows(apply: Apply, state: TrainState, batch: Any) -> list[str]:
    """Returns the paths of the arrays of integers and bools that depend on what is in the rows of a replica."""
    def counts(batch: Any, state: TrainState) -> dict[str, Any]:
        with replica_context.enter(_Agreeing(jax.tree.leaves(batch)[0].shape[0])):
            after = named_leaves(restricted(apply(state, batch), state.model_state))
        return {path: value for path, value in after.items() if not jnp.issubdtype(value.dtype, jnp.inexact)}

    return sorted(dependent_results(counts, batch, state))
