"""Averaging in place of a learning-rate schedule, with Keras's numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.optimizers.transforms.moments import one_minus_power

Tree = Any


class ScheduleFreeState(NamedTuple):
    """The state of `descend_schedule_free`.

    Attributes:
      count: number of updates, an int32 scalar.
      base: weights to which steps are applied, a tree like the parameters. The parameters interpolate between these
        weights and their mean.
      nu: running mean of squared gradients, a tree like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax's states
    base: Tree
    nu: Tree


def descend_schedule_free(
    beta_1: float, beta_2: float, epsilon: float, warmup_steps: int
) -> optax.GradientTransformationExtraArgs:
    """Applies Adam's steps to separate weights, and interpolates the parameters between these weights and their mean.

    Source: Defazio et al., "The Road Less Scheduled", 2024, algorithm 1.
    """
    # Rounded to float32 first, as in Keras, so that 1 - beta is the same number everywhere.
    beta_1, beta_2 = float(np.float32(beta_1)), float(np.float32(beta_2))

    def init(params: Tree) -> ScheduleFreeState:
        return ScheduleFreeState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params), optax.tree.zeros_like(params))

    def update(
        grads: Tree, state: ScheduleFreeState, params: Tree, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, ScheduleFreeState]:
        count = optax.safe_increment(state.count)
        step = count.astype(jnp.float32)
        rate = learning_rate * jnp.minimum(step / warmup_steps, 1.0) if warmup_steps else learning_rate
        nu = optax.tree.update_moment(grads, state.nu, beta_2, 2)
        correction = one_minus_power(beta_2, count)

        def moved(base: jax.Array, grad: jax.Array, square: jax.Array) -> jax.Array:
            return (base - rate * grad / (jnp.sqrt(square / correction) + epsilon)).astype(base.dtype)

        base = jax.tree.map(moved, state.base, grads, nu)

        def change(param: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
            mean = (param - (1 - beta_1) * before) / beta_1
            mean = (1 - 1 / step) * mean + after / step
            return ((1 - beta_1) * after + beta_1 * mean - param).astype(param.dtype)

        return jax.tree.map(change, params, state.base, base), ScheduleFreeState(count, base, nu)

    return optax.GradientTransformationExtraArgs(init, update)
