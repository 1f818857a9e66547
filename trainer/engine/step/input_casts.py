"""Inputs under a dtype policy: the inputs that a module's boundary casts, and values that would become infinite.

Layers cast their inputs themselves, as in Keras, so that all other code computes with the values that the user passed:
ids in float32, years, seconds. A module that multiplies an input by its own weights has no such layer there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.core import replica_context
from trainer.core.compile.traces.first_uses import NARROWING, PRODUCT, first_uses
from trainer.core.errors import describe
from trainer.core.precision import Policy, is_narrowed
from trainer.core.tree_paths import argument_names
from trainer.core.types import PyTree
from trainer.data.sources.arrays import DataError


def multiplied_inputs(
    apply: Callable[..., Any], params: PyTree, model_state: PyTree, inputs: PyTree, policy: Policy,
    known: dict[Hashable, Any], name: Hashable,
) -> Any:
    """Returns whether the boundary of a module casts each leaf of its inputs, as a tree of booleans.

    It casts a floating leaf that the module only multiplies, in matrix products and convolutions.

    Args:
      apply: the module as a function of the parameters, the state and the inputs. It is traced, without computing.
      params, model_state, inputs: its arguments, which may be traced.
      policy: the dtype policy.
      known: results of earlier calls, which this call adds to.
      name: identifies `apply` in `known`.
    """
    if not any(is_narrowed(leaf, policy.compute_dtype) for leaf in jax.tree.leaves(inputs)):
        return False
    shapes = jax.tree.map(_shape_of, inputs)
    key = name, jax.tree.structure(shapes), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
    if key not in known:
        params, model_state = jax.tree.map(_shape_of, (params, model_state))
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, policy.compute_dtype) if is_narrowed(
            leaf, policy.compute_dtype) else leaf, params)

        def outputs_of(values: PyTree) -> Any:
            # Apart from the step, whose context counts the calls of a module.
            with replica_context.enter(replica_context.context_outside(values["inputs"])):
                return apply(values["params"], values["state"], values["inputs"])[0]

        uses = first_uses(
            outputs_of, {"params": params, "state": model_state, "inputs": shapes}, policy.compute_dtype)["inputs"]
        known[key] = jax.tree.map(lambda found: PRODUCT in found and found <= {PRODUCT, NARROWING}, uses,
                                  is_leaf=lambda node: isinstance(node, set))
    return known[key]


def overflows(policy: Policy) -> bool:
    """Returns whether numbers of ordinary size do not fit into the compute dtype, which is so for float16."""
    return float(jnp.finfo(policy.compute_dtype).max) < 1e38


def check_inputs_fit(policy: Policy, x: PyTree, uses: Callable[[], PyTree]) -> None:
    """Raises DataError if the module would convert a finite input to an infinite number of the compute dtype.

    Args:
      policy: the dtype policy.
      x: inputs on the host; additional leading axes are allowed.
      uses: returns a tree like `x` with the `first_uses` of each leaf; called if a number is too large.
    """
    most = float(jnp.finfo(policy.compute_dtype).max)
    large = {name: (leaf, value) for name, leaf in zip(argument_names(x), jax.tree.leaves(x), strict=True)
             if (value := _largest(leaf)) > most}
    if not large:
        return
    found = jax.tree.leaves(uses(), is_leaf=lambda node: isinstance(node, set))
    for name, uses_of_leaf in zip(argument_names(x), found, strict=True):
        if name in large and NARROWING in uses_of_leaf:
            leaf, value = large[name]
            raise DataError(
                f"`{name}` must fit into {policy.compute_dtype}, in which the model's layers compute by "
                f"`compile(precision={policy.name!r})`: magnitudes up to {most:g}. Received: {describe(leaf)} with a "
                f"magnitude of {value:g}, which would become infinite. Scale the inputs, or use "
                "precision=\"mixed_bfloat16\".")


def _largest(leaf: Any) -> float:
    """Returns the largest magnitude of the finite numbers of an array."""
    array = np.asarray(leaf)
    if not array.size or not (np.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        return 0.0
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        array = array[np.isfinite(array)]
        low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    return max(-low, high)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
