"""Follow-the-regularized-leader, with Keras's numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class FtrlState(NamedTuple):
    """The state of follow-the-regularized-leader: two trees like the parameters.

    Attributes:
      accumulator: sums of squared gradients.
      linear: sums of gradients, corrected for changes of the per-weight step size.
    """

    accumulator: Tree
    linear: Tree


def follow_regularized_leader(
    initial_accumulator_value: float, learning_rate_power: float, l1: float, l2: float, l2_shrinkage: float,
    beta: float,
) -> optax.GradientTransformationExtraArgs:
    """Moves each weight to the minimum of the linearized past losses, with pulls to 0 and to past weights.

    The new weight depends on the current weight only through `linear`. Nothing changes at a rate of 0, or without any
    gradient after an accumulator of 0, where Keras divides by 0.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, algorithm 1.
    """
    power = -learning_rate_power

    def init(params: Tree) -> FtrlState:
        return FtrlState(optax.tree.full_like(params, initial_accumulator_value), optax.tree.zeros_like(params))

    def update(
        grads: Tree, state: FtrlState, params: Tree, *, learning_rate: jax.Array, **extra: Any
    ) -> tuple[Tree, FtrlState]:
        moves = learning_rate > 0
        rate = jnp.where(moves, learning_rate, 1)

        def accumulate(grad: jax.Array, before: jax.Array) -> jax.Array:
            return before + jnp.where(moves, jnp.square(grad), 0).astype(before.dtype)

        def add(grad: jax.Array, linear: jax.Array, before: jax.Array, now: jax.Array, param: jax.Array) -> jax.Array:
            pulled = grad + 2 * l2_shrinkage * param - (now**power - before**power) / rate * param
            return linear + jnp.where(moves, pulled, 0).astype(linear.dtype)

        def step(linear: jax.Array, accumulator: jax.Array, param: jax.Array) -> jax.Array:
            quadratic = accumulator**power / rate + 2 * (l2 + beta / (2 * rate))
            target = (jnp.clip(linear, -l1, l1) - linear) / jnp.where(quadratic > 0, quadratic, 1)
            return jnp.where(moves & (quadratic > 0), target - param, 0).astype(param.dtype)

        accumulator = jax.tree.map(accumulate, grads, state.accumulator)
        linear = jax.tree.map(add, grads, state.linear, state.accumulator, accumulator, params)
        return jax.tree.map(step, linear, accumulator, params), FtrlState(accumulator, linear)

    return optax.GradientTransformationExtraArgs(init, update)
