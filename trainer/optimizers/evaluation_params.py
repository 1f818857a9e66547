"""The parameters for evaluation of averaging optimizers, which differ from the trained parameters.

Owns the optax states that hold such parameters: Schedule-Free's average follows from its sequence `z`, and lookahead's
slow parameters are stored next to its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.core.types import PyTree


class SlowParamsState(NamedTuple):
    """The state of a transformation that contains `optax.lookahead`, with the slow parameters.

    Optax itself keeps the slow parameters in `optax.LookaheadParams`.

    Attributes:
      slow: slow parameters, a tree like the parameters.
      inner: state of the transformation.
    """

    slow: PyTree
    inner: Any


def with_slow_params(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Converts a transformation of `optax.LookaheadParams` to plain parameters, with the slow parameters in its state.

    Source: `optax.lookahead`.
    """
    transformation = optax.with_extra_args_support(transformation)

    def init(params: PyTree) -> SlowParamsState:
        slow = jax.tree.map(jnp.copy, params)
        return SlowParamsState(slow, transformation.init(optax.LookaheadParams(params, slow)))

    def update(grads: PyTree, state: SlowParamsState, params: PyTree, **extra: Any) -> tuple[Any, SlowParamsState]:
        pair = optax.LookaheadParams(params, state.slow)
        updates, inner = transformation.update(grads, state.inner, pair, **extra)
        return updates.fast, SlowParamsState(optax.apply_updates(state.slow, updates.slow), inner)

    return optax.GradientTransformationExtraArgs(init, update)


# The field of each state from which the parameters for evaluation follow, a tree like the parameters.
_KEPT = {SlowParamsState: "slow", optax.contrib.ScheduleFreeState: "z"}


def keeps_averages(state: PyTree) -> bool:
    """Returns whether a state of an optax transformation contains the state of an averaging optimizer."""
    return bool(_averaging(state))


def evaluation_params(state: PyTree, params: PyTree) -> Any:
    """Returns the parameters for evaluation, in the dtypes of `params`.

    For optimizers that do not average, returns `params` itself.

    Args:
      state: state of an optax transformation.
      params: the trained parameters.

    Example:
      >>> optimizer, params = optax.contrib.schedule_free_sgd(0.5), {"w": jnp.ones(())}
      >>> state = optimizer.init(params)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update({"w": jnp.ones(())}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(params["w"]), 3), round(float(evaluation_params(state, params)["w"]), 3)
      (0.225, 0.25)

    Source: `optax.contrib.schedule_free_eval_params`.
    """
    for averaging in _averaging(state):
        # Parameters that a mask hides from the optimizer are not averaged.
        params = jax.tree.map(
            lambda kept, param, of=averaging: param if _is_masked(kept) else _evaluated(of, kept, param),
            _kept(averaging), params, is_leaf=_is_masked)
    return params


def map_averages(function: Callable[..., jax.Array], state: PyTree, *trees: PyTree) -> Any:
    """Maps `function(path, array, *leaves of trees)` over the arrays of a state from which averages are computed.

    Args:
      function: receives the key path of a parameter, its array, and a leaf of each of `trees`.
      state: state of an optax transformation.
      *trees: trees like the parameters.
    """
    def replaced(node: Any) -> Any:
        if not _is_averaging(node):
            return node
        return node._replace(**{_KEPT[type(node)]: jax.tree_util.tree_map_with_path(
            lambda path, kept, *leaves: kept if _is_masked(kept) else function(path, kept, *leaves), _kept(node),
            *trees, is_leaf=_is_masked)})

    return jax.tree.map(replaced, state, is_leaf=_is_averaging)


def _averaging(state: PyTree) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_averaging) if _is_averaging(node)]


def _is_averaging(node: object) -> bool:
    return type(node) in _KEPT


def _kept(node: object) -> Any:
    return getattr(node, _KEPT[type(node)])


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def _evaluated(node: Any, kept: jax.Array, param: jax.Array) -> jax.Array:
    if isinstance(node, SlowParamsState):
        return kept
    return optax.contrib.schedule_free_eval_params(node._replace(z=kept), param).astype(param.dtype)
