"""Transformations before or after an optimizer's transformation: clips, the learning rate, weight decay.

Keras multiplies by the learning rate before accumulating momentum, so that a new rate does not change accumulated
steps. Transformations therefore receive the rate as the extra argument `learning_rate`, a float32 scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.core.tree_paths import path_name

Tree = Any


def descend() -> optax.GradientTransformationExtraArgs:
    """Multiplies by the negative learning rate."""

    def update(
        grads: Tree, state: optax.EmptyState, params: Tree = None, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, optax.EmptyState]:
        return jax.tree.map(lambda grad: (-learning_rate * grad).astype(grad.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip_each_by_norm(clipnorm: float) -> optax.GradientTransformation:
    """Scales each gradient array separately to an L2 norm of at most `clipnorm`."""

    def clip(grad: jax.Array, param: jax.Array) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(grad)))
        return grad * (clipnorm / jnp.maximum(norm, clipnorm))

    return optax.stateless_with_tree_map(clip)


def cast_to_params() -> optax.GradientTransformation:
    """Casts the gradients to the dtypes of the parameters, so that the dtypes of the state do not change."""
    return optax.stateless(lambda grads, params: optax.tree.cast_like(grads, params))


def after_weight_decay(
    step: optax.GradientTransformation, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    """Subtracts `learning_rate * weight_decay` times the parameters, then applies `step` to the decayed parameters.

    With the extra argument `decays`, a function of a parameter's path, only parameters for which it is true decay.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017.
    """
    step = optax.with_extra_args_support(step)

    def update(
        grads: Tree, state: Tree, params: Tree, *, learning_rate: jax.Array,
        decays: Callable[[str], bool] = lambda path: True, **extra: Any
    ) -> tuple[Tree, Tree]:
        def decayed_by(path: Any, param: jax.Array) -> jax.Array:
            if not decays(path_name(path)):
                return jnp.zeros_like(param)
            return (-learning_rate * weight_decay * param).astype(param.dtype)

        decay = jax.tree_util.tree_map_with_path(decayed_by, params)
        decayed = optax.apply_updates(params, decay)
        updates, state = step.update(grads, state, decayed, learning_rate=learning_rate, **extra)
        return optax.tree.add(updates, decay), state

    return optax.GradientTransformationExtraArgs(step.init, update)
