"""The parameters that averaging optimizers want to be evaluated, which are not those that they train.

Owns which states of optax hold such parameters, and where: Schedule-Free's average follows from its sequence `z`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from trainer.core.types import PyTree

FromParams = Callable[[Any, PyTree], Any]


def keeps_averages(state: PyTree) -> bool:
    """Returns whether a state of an optax transformation, or a part of it, is of an averaging optimizer."""
    return bool(_averaging(state))


def evaluation_params(state: PyTree, params: PyTree) -> Any:
    """Returns the parameters to evaluate, in the dtypes of `params`; `params` itself of any other optimizer.

    Args:
      state: the state of an optax transformation.
      params: the parameters that it trains.

    Example:
      >>> import jax.numpy as jnp
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
        # Parameters that a mask hides from the optimizer stay as they are.
        params = jax.tree.map(lambda z, param, of=averaging: param if _is_masked(z) else _schedule_free(of, z, param),
                              averaging.z, params, is_leaf=_is_masked)
    return params


def map_averages(function: Callable[..., jax.Array], state: PyTree, *trees: PyTree) -> Any:
    """Returns a state with `function(path, array, *leaves of trees)` in place of what averages are computed from.

    Args:
      function: takes the key path of a parameter and its array.
      state: the state of an optax transformation.
      *trees: trees like the parameters.
    """
    def replaced(node: Any) -> Any:
        if not _is_averaging(node):
            return node
        return node._replace(z=jax.tree_util.tree_map_with_path(
            lambda path, z, *leaves: z if _is_masked(z) else function(path, z, *leaves), node.z, *trees,
            is_leaf=_is_masked))

    return jax.tree.map(replaced, state, is_leaf=_is_averaging)


def _averaging(state: PyTree) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_averaging) if _is_averaging(node)]


def _is_averaging(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _schedule_free(state: Any, z: jax.Array, param: jax.Array) -> jax.Array:
    return optax.contrib.schedule_free_eval_params(state._replace(z=z), param).astype(param.dtype)
